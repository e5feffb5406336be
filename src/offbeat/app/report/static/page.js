{
  const data = JSON.parse(document.getElementById("data").textContent);
  startCurves(data.curves);
  startTimelines(data.timelines);
}
