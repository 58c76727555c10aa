// Values under the pointer, and the filter of the trajectories. Without it the page is complete.
"use strict";

const hover = document.body.appendChild(document.createElement("div"));
hover.id = "hover";
hover.hidden = true;

for (const svg of document.querySelectorAll("svg.chart")) {
  const numbers = (text) => text.split(" ").map(Number);
  const lines = [...svg.querySelectorAll("polyline")].map((line) => ({
    name: line.dataset.name,
    steps: numbers(line.dataset.x),
    values: line.dataset.y.split(" "),
    places: line.getAttribute("points").split(" ").map((place) => Number(place.split(",")[0])),
  }));
  svg.querySelectorAll("title").forEach((title) => title.remove()); // shown by this script
  const rule = document.createElementNS(svg.namespaceURI, "line");
  rule.setAttribute("class", "rule");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = ((event.clientX - box.left) * view.width) / box.width;
    let step = NaN, place = Infinity;
    for (const line of lines)
      line.places.forEach((here, i) => {
        if (Math.abs(here - x) < Math.abs(place - x)) [place, step] = [here, line.steps[i]];
      });
    const found = lines.map((line) => [line.name, line.values[line.steps.indexOf(step)]]);
    const texts = found.filter(([, value]) => value !== undefined);
    hover.textContent = [`step ${step}`, ...texts.map(([name, v]) => `${v}  ${name}`)].join("\n");
    hover.hidden = false;
    const side = event.pageX + hover.offsetWidth + 30 > innerWidth ? -hover.offsetWidth - 15 : 15;
    hover.style.left = `${Math.max(0, event.pageX + side)}px`;
    hover.style.top = `${event.pageY + 10}px`;
    for (const [name, value] of [["x1", place], ["x2", place], ["y1", 12], ["y2", view.height - 34]])
      rule.setAttribute(name, value);
    svg.append(rule);
  });
  svg.addEventListener("pointerleave", () => {
    hover.hidden = true;
    rule.remove();
  });
}

const form = document.getElementById("filter");
if (form) {
  const rows = [...document.querySelectorAll("#trajectories tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const isWithin = (value, low, high) =>
    (low === "" || (value !== "" && +value >= +low)) &&
    (high === "" || (value !== "" && +value <= +high));
  const apply = () => {
    const wanted = Object.fromEntries(new FormData(form));
    rows.forEach((row, i) => {
      const has = row.dataset;
      row.hidden = !(
        texts[i].includes(wanted.text.toLowerCase()) &&
        (!wanted.set || has.set === wanted.set) && (!wanted.outcome || has.outcome === wanted.outcome) &&
        isWithin(has.step, wanted.step_from, wanted.step_to) &&
        isWithin(has.reward, wanted.reward_from, wanted.reward_to)
      );
    });
    form.querySelector("output").textContent =
      `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
}

// A page of a running job reloads, unless its reader is at a trajectory or filters them.
const reload = document.body.dataset.reload;
const isRead = () =>
  document.querySelector("#trajectories details[open]") ||
  (form && [...new FormData(form).values()].some((value) => value !== ""));
if (reload) setInterval(() => isRead() || location.reload(), reload * 1000);
