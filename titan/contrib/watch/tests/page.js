// Runs the script of a page that `titan watch --once` wrote, with a document that is enough to draw: node page.js PAGE.html
// Prints what test_watch.py expects; throws where a coordinate is no number.
const fs = require("fs"), vm = require("vm");
const text = fs.readFileSync(process.argv[2], "utf8"), script = text.split("<script>")[1].split("</script>")[0];
const calls = {}; let labels = [];
const ctx = new Proxy({}, { get: (t, k) => k in t ? t[k] : (...a) => { calls[k] = (calls[k] || 0) + 1; if (k == "fillText") labels.push(a[0]); if (["lineTo","moveTo","arc"].includes(k) && a.some(v => typeof v == "number" && !isFinite(v))) throw new Error(k + " " + a); }, set: (t, k, v) => (t[k] = v, true) });
class El { constructor(tag) { this.tag = tag; this.children = []; this.style = { setProperty() {} }; this.handlers = {}; this.className = ""; this.clientWidth = 600; this.classList = { add() {} }; this.textContent = ""; this.offsetWidth = 10; this.offsetHeight = 10; }
  append(...x) { this.children.push(...x); } replaceChildren(...x) { this.children = x; } addEventListener(n, f) { this.handlers[n] = f; } getContext() { return ctx; } getBoundingClientRect() { return { left: 0, top: 0 }; } }
const byId = {}, document = { getElementById: id => byId[id] ||= new El(id), createElement: t => new El(t), documentElement: {}, hidden: false };
const all = (e, f, out = []) => { if (e instanceof El) { if (f(e)) out.push(e); e.children.forEach(c => all(c, f, out)); } return out; };
const page = vm.createContext({ document, getComputedStyle: () => ({ getPropertyValue: () => "#000" }), devicePixelRatio: 1, addEventListener() {}, matchMedia: () => ({ addEventListener() {} }), innerWidth: 1000, innerHeight: 800, console, setTimeout() {}, isFinite });
vm.runInContext(script, page);
const charts = byId.charts, canvas = all(charts, e => e.tag == "canvas")[0], log = all(charts, e => e.tag == "button")[0];
const legends = all(charts, e => e.className == "legend").map(l => all(l, e => e.tag == "span").map(s => s.textContent || s.children[1]).join("|"));
console.log(JSON.stringify({ strokes: calls.stroke, dots: calls.arc, cells: calls.fillRect, dashes: calls.setLineDash, legend: legends[0] }));
labels = []; log.handlers.click(); console.log("log", JSON.stringify(labels.slice(0, 4)));
canvas.handlers.pointerdown({ clientX: 100 }); canvas.handlers.pointerup({ clientX: 300 }); console.log("zoom", byId.zoom.textContent);
canvas.handlers.pointermove({ clientX: 200, clientY: 5 }); console.log("tip", JSON.stringify(byId.tip.textContent));
canvas.handlers.dblclick(); console.log("zoom", byId.zoom.textContent);
const marks = `Object.keys(AXES).map(name => { axis = name; return runs.map(run => run.starts.map(start => startAt(run, start))); })`;
console.log(JSON.stringify(vm.runInContext(marks, page)));
