/* The page of a run that goes on loads itself again, unless its reader has paused it. */
function startReloads(seconds) {
  const button = document.querySelector("button[data-live]");
  if (!seconds || !button) return;
  let timer = null;
  const run = () => { timer = setTimeout(() => location.reload(), 1000 * seconds); };
  button.addEventListener("click", () => {
    const paused = timer === null;
    if (paused) run(); else { clearTimeout(timer); timer = null; }
    button.textContent = paused ? "pause" : "go on";
  });
  run();
}

/* A table that is wider than its box says so in its title, as long as it is. */
function startCues() {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      target.classList.toggle("overflows", target.scrollWidth > target.clientWidth + 1);
    }
  });
  for (const box of document.querySelectorAll(".scroll")) observer.observe(box);
}

{
  const data = JSON.parse(document.getElementById("data").textContent);
  if (data.refresh) document.documentElement.dataset.live = "on";
  startCurves(data.curves, data.front);
  startTimelines(data.timelines);
  startCues();
  startReloads(data.refresh);
}
