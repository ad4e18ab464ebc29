"""Draw a simulated step for the docs: what each GPU does, and the memory in use, as SVG.

    titan sim train_configs/llama3_8b.toml --world-size 8 --hardware h100-sxm --html step.html
    python scripts/step_picture.py step.html docs/pictures/front.svg

The data and colours are those of the page that `titan sim` wrote. Text has 11 to 15 pixels, on a telephone and on a wide page.
"""

import json
import re
import sys
from pathlib import Path

WIDTH, LINE, MEMORY = 800, 36, 220  # units of the picture
# A telephone shows it at less than half of its size. The paper has a colour, since the page may be dark.
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="-16 -16 {width} {height}"><style>
svg {{ font: 15px system-ui, sans-serif; }} .paper {{ fill: #fff; }} text {{ fill: #1c1c1c; }} .title {{ font-weight: 600; }}
@media (prefers-color-scheme: dark) {{ .paper {{ fill: #161616; }} text {{ fill: #e8e8e8; }} }}
@media (max-width: 520px) {{ svg {{ font-size: 25px; }} }}
</style><rect class="paper" x="-16" y="-16" width="100%" height="100%"/>
{shown}</svg>
"""


def draw(html: str) -> str:
    """Return the picture of a page: rows of text, bars and areas, one below the other."""
    data = json.loads(re.findall(r"^const data = (.*);$", html, re.M)[0])
    colours = dict(re.findall(r'(\w+): "(#\w{6})"', html))
    categories, step_s = data["categories"], data["facts"]["step_time_s"]
    scale = WIDTH / step_s / 1e3  # from milliseconds
    rows: list[tuple[int, str]] = []  # height and content

    def text(words: str, kind: str = "") -> None:
        rows.append((LINE, f'<text class="{kind}" y="{LINE - 10}">{words}</text>'))

    def key(names: list[str]) -> None:
        text(" ".join(f'<tspan fill="{colours[name]}">■</tspan> {name}' for name in names))

    text(data["title"], "title")
    text(f"{step_s:.3g} s a step, {data['speed'].replace(' ', ' tokens/s/GPU ', 1)}")
    key(["forward", "backward", "recompute", "optimizer", "transfer"])
    for rank in data["ranks"]:
        for name, bars in rank["lanes"][1:]:  # without the host's
            if "copy" in name:
                continue
            text(f"rank {rank['rank']}: {name.rpartition(': ')[2]}")
            shapes = (
                f'<path fill="{colours[kind]}" d="M{start * scale:.1f} 0V{LINE}H{end * scale:.1f}V0z"/>'
                for start, end, kind, _ in bars
            )
            rows.append((LINE, "".join(shapes)))
        text(f"memory in use; reserved: {rank['reserved_gib']:.1f} GiB", "title")
        key(categories[:3])
        key(categories[3:])
        for number, category in reversed([*enumerate(categories, 1)]):
            tops = (
                f"{place * WIDTH:.1f},{MEMORY - sum(gib[:number]) / rank['reserved_gib'] * MEMORY:.1f}"
                for place, _, gib, _ in rank["memory"]
            )
            area = f"0,{MEMORY} {' '.join(tops)} {WIDTH},{MEMORY}"
            rows.append((0, f'<polygon fill="{colours[category]}" points="{area}"/>'))
        rows.append((MEMORY, f'<path stroke="#888" stroke-dasharray="6" d="M0 0H{WIDTH}"/>'))
    y, shown = 0, ""
    for height, content in rows:
        shown += f'<g transform="translate(0 {y})">{content}</g>\n'
        y += height
    return PICTURE.format(width=WIDTH + 32, height=y + 32, shown=shown)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1]).read_text("utf-8")), "utf-8")
