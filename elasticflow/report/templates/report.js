"use strict";
// The nearest point of a plot, under the pointer.
const tip = document.getElementById("tip");
for (const area of document.querySelectorAll(".area")) {
  const data = JSON.parse(area.querySelector(".points").textContent);
  const cross = area.querySelector(".cross");
  const points = data.points;
  const hide = () => { tip.hidden = cross.hidden = true; };
  area.addEventListener("pointerleave", hide);
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * 1000;
    const y = (event.clientY - box.top) / box.height * 240;
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    let best = null, least = Infinity;
    for (let i = Math.max(0, low - 40); i < Math.min(points.length, low + 40); i++) {
      const dx = (points[i][0] - x) * box.width / 1000, dy = (points[i][1] - y) * box.height / 240;
      const distance = dx * dx * 9 + dy * dy;
      if (distance < least) { least = distance; best = points[i]; }
    }
    if (!best) return hide();
    cross.style.left = best[0] / 10 + "%";
    cross.style.top = best[1] / 2.4 + "%";
    tip.textContent = `step ${best[2].toLocaleString("en")}: ${best[3]} (${data.labels[best[4]]})`;
    tip.hidden = cross.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
  });
}
document.documentElement.dataset.ready = "yes";
