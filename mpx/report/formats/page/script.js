"use strict";
// Shows the values under the pointer, and under the arrow keys for who uses no pointer. The page is whole without it.
for (const plot of document.querySelectorAll(".plot")) {
  const places = JSON.parse(plot.querySelector("script").textContent);
  const svg = plot.querySelector("svg");
  if (!places.length) continue;
  const { width, height } = svg.viewBox.baseVal;

  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    return svg.appendChild(element);
  };
  const cursor = make("line", { class: "cursor", y1: 20, y2: height - 44, visibility: "hidden" });
  // On top, with an empty title: the browser's own hint would cover ours.
  make("rect", { class: "hit", width, height }).appendChild(document.createElementNS(svg.namespaceURI, "title"));

  const tip = plot.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", svg.querySelector("title").textContent + ": the arrow keys read the values");

  let shown = -1;
  const hide = () => {
    shown = -1;
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  const show = (index) => {
    if (index === shown) return;
    shown = index;
    const [x, heading, items] = places[index];
    const head = document.createElement("b");
    head.textContent = heading;
    tip.replaceChildren(head, ...items.slice(0, 8).map(([, text]) => {
      const line = document.createElement("span");
      line.textContent = text;
      return line;
    }));
    tip.hidden = false;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const at = x / width * svg.clientWidth;
    const room = svg.clientWidth - tip.offsetWidth;
    const beside = at + 12 > room ? at - 12 - tip.offsetWidth : at + 12;
    tip.style.transform = `translate(${Math.max(0, Math.min(beside, room))}px, 24px)`;
  };
  const nearest = (x) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle][0] < x) low = middle; else high = middle;
    }
    return x - places[low][0] <= places[high][0] - x ? low : high;
  };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    show(nearest((event.clientX - box.left) / box.width * width));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const last = places.length - 1;
    const to = { ArrowRight: Math.min(shown + 1, last), ArrowLeft: Math.max(shown - 1, 0), Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}
