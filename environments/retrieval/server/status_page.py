"""The page that a browser shows at `/`: what the server is doing, and a box to ask it. It asks `/status` every two seconds and
needs nothing else; queries and passages are shown as text, whatever they hold."""

from __future__ import annotations

STATUS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlflow search</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --rate: #2a7de1; --typical: #d9730d; --slowest: #8a63a6; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.25rem; } h1 span { font-weight: normal; opacity: .7; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
  .tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
  .tile { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
  .tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
  .tile small, .axis { opacity: .7; }
  progress { width: 100%; } pre { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow: auto; }
  figure { margin: .8rem 0; display: grid; grid-template-columns: 4.5rem 1fr; column-gap: .4rem; }
  figcaption { grid-column: 2; } .axis { font-size: .8rem; font-variant-numeric: tabular-nums; }
  .values { display: flex; flex-direction: column; justify-content: space-between; text-align: right; }
  .times { grid-column: 2; display: flex; justify-content: space-between; }
  svg { width: 100%; height: 6rem; border: 1px solid var(--line); border-radius: .3rem; }
  polyline { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; } line { stroke: var(--line); vector-effect: non-scaling-stroke; }
  #rate, .rate { stroke: var(--rate); color: var(--rate); } #p50, .p50 { stroke: var(--typical); color: var(--typical); }
  #p99, .p99 { stroke: var(--slowest); color: var(--slowest); }
  form { display: flex; gap: .5rem; } input[type=search] { flex: 1; font: inherit; padding: .3rem .5rem; } input[type=number] { width: 4rem; }
  ol { padding-left: 1.5rem; } li { margin: .4rem 0; overflow-wrap: anywhere; } table { border-collapse: collapse; width: 100%; }
  td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; } td.number { text-align: right; white-space: nowrap; }
</style>
</head>
<body>
<h1>rlflow search <span id="state">...</span></h1>
<progress id="progress" max="1" hidden></progress>
<div class="tiles" id="tiles"></div>
<figure>
  <figcaption class="rate">queries per second</figcaption>
  <div class="axis values"><span id="rate-top"></span><span id="rate-middle"></span><span>0</span></div>
  <svg viewBox="0 0 300 100" preserveAspectRatio="none"><line x1="0" x2="300" y1="50" y2="50"/><polyline id="rate"/></svg>
  <div class="axis times"><span>5 minutes ago</span><span>now</span></div>
</figure>
<figure>
  <figcaption>latency: <span class="p50">median</span> and <span class="p99">99th percentile</span></figcaption>
  <div class="axis values"><span id="latency-top"></span><span id="latency-middle"></span><span>0</span></div>
  <svg viewBox="0 0 300 100" preserveAspectRatio="none"><line x1="0" x2="300" y1="50" y2="50"/><polyline id="p50"/><polyline id="p99"/></svg>
  <div class="axis times"><span>5 minutes ago</span><span>now</span></div>
</figure>
<h2>Ask</h2>
<form id="ask"><input type="search" id="query" placeholder="a query" required><input type="number" id="topk" value="3" min="1" title="results"><button>search</button></form>
<p id="told"></p>
<ol id="results"></ol>
<h2>Recent searches</h2>
<table><tbody id="recent"></tbody></table>
<h2>What is served</h2>
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
const KEPT = 150;  // answers, one every two seconds
const history = [];
const at = id => document.getElementById(id);
const ms = seconds => (seconds * 1000).toFixed(seconds < 0.001 ? 2 : 1) + " ms";
const share = value => (value * 100).toFixed(1) + " %";
function made(name, text, kind) { return Object.assign(document.createElement(name), {textContent: text, className: kind || ""}); }
function round(value) {  // up to 1, 2 or 5 times a power of ten, so that the axis stands still
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map(factor => factor * power).find(top => top >= value * 0.999);
}
function draw(id, values, top) {
  const points = values.map((value, i) => `${300 - 300 * (values.length - 1 - i) / (KEPT - 1)},${100 - 100 * value / top}`);
  at(id).setAttribute("points", points.join(" "));
}
function axis(name, top, show) { at(name + "-top").textContent = show(top); at(name + "-middle").textContent = show(top / 2); }
function tile(name, text) {
  const box = made("div", "", "tile");
  box.append(made("small", name), made("b", text));
  return box;
}
function row(search) {
  const line = document.createElement("tr");
  line.append(made("td", search.query), made("td", search.found + " found", "number"), made("td", ms(search.seconds), "number"));
  return line;
}
async function recent(s) {
  if (location.hash.length < 2) return [made("tr", "shown where the address ends in #TOKEN; the server's first line says where its token lies")];
  const answer = await fetch("recent", {headers: {Authorization: "Bearer " + location.hash.slice(1)}});
  if (answer.ok && s.processes?.length > 1) return [made("tr", "each of the processes knows its own only")];
  if (answer.ok) return (await answer.json()).map(row);
  return [made("tr", "another token is needed: the server's first line says where it lies")];
}
async function refresh() {
  try {
    const s = await (await fetch("status")).json();
    at("state").textContent = s.status + (s.status === "loading" ? `: ${s.stage}, ${share(s.progress)}` : "");
    at("progress").hidden = s.status !== "loading";
    at("progress").value = s.progress;
    history.push(s);
    if (history.length > KEPT) history.shift();
    at("tiles").replaceChildren(...tiles.map(([name, show]) => tile(name, show(s))));
    at("info").textContent = JSON.stringify(s.info, null, 2);
    const most = round(Math.max(...history.map(h => h.queries_per_s))), slowest = round(Math.max(...history.map(h => h.p99_s)));
    draw("rate", history.map(h => h.queries_per_s), most);
    axis("rate", most, value => +value.toPrecision(3));
    draw("p50", history.map(h => h.p50_s), slowest);
    draw("p99", history.map(h => h.p99_s), slowest);
    axis("latency", slowest, ms);
    at("recent").replaceChildren(...await recent(s));
  } catch (problem) {
    at("state").textContent = "does not answer";
  }
  setTimeout(refresh, 2000);
}
function passage(hit) {
  const item = document.createElement("li"), [title, ...text] = String(hit.document.contents ?? "").split("\\n");
  item.append(made("b", title.replace(/^"|"$/g, "")), made("small", `  ${(+hit.score).toFixed(3)}  ${hit.document.id ?? ""}`));
  item.append(made("div", text.join(" ").slice(0, 600)));
  return item;
}
at("ask").addEventListener("submit", async event => {
  event.preventDefault();
  const asked = {queries: [at("query").value], topk: +at("topk").value, return_scores: true}, began = performance.now();
  const answer = await fetch("retrieve", {method: "POST", body: JSON.stringify(asked)});
  const found = await answer.json();
  at("results").replaceChildren(...(answer.ok ? found.result[0].map(passage) : []));
  at("told").textContent = answer.ok ? `${found.result[0].length} results in ${ms((performance.now() - began) / 1000)}` : found.detail;
});
refresh();
</script>
</body>
</html>
"""
