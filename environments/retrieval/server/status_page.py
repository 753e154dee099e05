"""The page that a browser shows at `/`: what the server is doing. It asks `/status` every two seconds and needs nothing else."""

from __future__ import annotations

STATUS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlflow search</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --accent: #2a7de1; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.25rem; } h1 span { font-weight: normal; opacity: .7; }
  .tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
  .tile { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
  .tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
  .tile small { opacity: .7; }
  progress { width: 100%; } pre { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow: auto; }
  svg { width: 100%; height: 5rem; border: 1px solid var(--line); border-radius: .5rem; }
  polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
</style>
</head>
<body>
<h1>rlflow search <span id="state">...</span></h1>
<progress id="progress" max="1" hidden></progress>
<div class="tiles" id="tiles"></div>
<small>queries per second</small>
<svg viewBox="0 0 300 50" preserveAspectRatio="none"><polyline id="rate"/></svg>
<small>latency: median and 99th percentile</small>
<svg viewBox="0 0 300 50" preserveAspectRatio="none"><polyline id="p50"/><polyline id="p99" style="opacity:.5"/></svg>
<h2 style="font-size:1rem">What is served</h2>
<pre id="info"></pre>
<script>
const tiles = [
  ["queries/s", s => s.queries_per_s.toFixed(1)],
  ["latency p50", s => ms(s.p50_s)],
  ["latency p99", s => ms(s.p99_s)],
  ["in the queue, p99", s => ms(s.queue_p99_s)],
  ["searching, p50", s => ms(s.search_p50_s)],
  ["waiting now", s => s.queue],
  ["cache hits", s => share(s.hit_rate)],
  ["empty results", s => share(s.empty_rate)],
  ["processes (restarts)", s => s.processes ? `${s.processes.filter(p => p.ready).length} (${s.restarts})` : "1"],
];
const history = [];
const ms = seconds => (seconds * 1000).toFixed(1) + " ms";
const share = value => (value * 100).toFixed(1) + " %";
function draw(id, values, top) {
  const points = values.map((value, i) => `${300 - 2 * (values.length - i)},${49 - 47 * value / (top || 1)}`);
  document.getElementById(id).setAttribute("points", points.join(" "));
}
function tile(name, text) {
  const box = document.createElement("div");
  box.className = "tile";
  box.append(Object.assign(document.createElement("small"), {textContent: name}));
  box.append(Object.assign(document.createElement("b"), {textContent: text}));
  return box;
}
async function refresh() {
  const state = document.getElementById("state"), bar = document.getElementById("progress");
  try {
    const s = await (await fetch("status")).json();
    state.textContent = s.status + (s.status === "loading" ? `: ${s.stage}, ${share(s.progress)}` : "");
    bar.hidden = s.status !== "loading";
    bar.value = s.progress;
    history.push(s);
    if (history.length > 150) history.shift();
    document.getElementById("tiles").replaceChildren(...tiles.map(([name, show]) => tile(name, show(s))));
    document.getElementById("info").textContent = JSON.stringify(s.info, null, 2);
    draw("rate", history.map(h => h.queries_per_s), Math.max(...history.map(h => h.queries_per_s)));
    const slowest = Math.max(...history.map(h => h.p99_s));
    draw("p50", history.map(h => h.p50_s), slowest);
    draw("p99", history.map(h => h.p99_s), slowest);
  } catch (problem) {
    state.textContent = "does not answer";
  }
  setTimeout(refresh, 2000);
}
refresh();
</script>
</body>
</html>
"""
