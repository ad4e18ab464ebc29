"""Write Parquet files with the columns of FineWeb-Edu, of texts that ship with Python: `fineweb_edu.py FOLDER`.

On the hub a file has about 726,000 rows, in row groups of 1,000.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan.config.schema import StdlibSource
from titan.data.reading import pieces_of
from titan.data.sources import open_documents


def write_files(folder: Path, texts: list[str], *, files: int = 3, group: int = 10) -> None:
    """Share the texts among files, in row groups of `group` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        rows = [
            {
                "text": text,
                "id": f"<urn:uuid:{number}-{row}>",
                "dump": "CC-MAIN-2024-10",
                "url": f"https://example.org/{row}",
                "file_path": "s3://commoncrawl/crawl-data/CC-MAIN-2024-10/a.warc.gz",
                "language": "en",
                "language_score": 0.9,
                "token_count": len(text) // 4,
                "score": 3.2,
                "int_score": 3,
            }
            for row, text in enumerate(texts[number::files])
        ]
        file = folder / f"{number:03}_00000.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)


if __name__ == "__main__":
    documents = open_documents(StdlibSource()).read()
    write_files(Path(sys.argv[1]), ["".join(pieces_of(d))[:4000] for d in documents])
