
// Of a run that goes on: chunks are fetched, and what is new every few seconds.
const REFRESH_MS = 3000;

stored = async (id) => {
  if ($(id)) return $(id).textContent;
  const answer = await fetch(id);
  if (!answer.ok) throw new Error(`the run does not give ${id}`);
  return answer.text();
};

async function refresh() {
  try {
    const answer = await fetch(`now-${version}`);
    const now = await answer.json();
    $("status").textContent = now.status;
    if (now.version !== version && !String(getSelection())) renew(now);  // a selection would be lost
    $("lost").hidden = true;
  } catch (problem) { $("lost").hidden = false; }
  setTimeout(refresh, REFRESH_MS);
}

// The server has escaped what it sends as HTML, and no script runs that comes this way.
function renew(now) {
  version = now.version;
  $("holds").textContent = now.holds;
  $("findings").innerHTML = now.findings;
  $("run").innerHTML = now.overview;
  const filters = JSON.stringify(index.attributes);
  index = now.index;
  if (filters !== JSON.stringify(index.attributes)) offer();
  offerKinds();
  if (state.kind !== "run") $("step").max = String(steps().length - 1);  // who reads an episode goes on reading
}

setTimeout(refresh, REFRESH_MS);
