// The page: a figure for each section, the causes beside it, and copying.

class Section {
  constructor(element) {
    this.element = element;
    const data = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
    this.figure = new Figure(element.querySelector(".lanes"), data);
    this.causes = [...element.querySelectorAll("details.cause")];
    this.handles = new Handles(this.figure, (index) => this.select(index, true));
    this.at = -1;
    for (const cause of this.causes) this.listen(cause);
    if (this.causes.length) this.select(0, false);
    new ResizeObserver(() => this.figure.draw()).observe(this.figure.canvas);
    this.figure.drawNow();
    element.dataset.drawnMs = performance.now().toFixed(1);
  }

  listen(cause) {
    const index = Number(cause.dataset.cause);
    cause.querySelector("summary").addEventListener("click", () => this.select(cause.open ? -1 : index, false));
    cause.querySelector(".moments").addEventListener("click", (event) => {
      const action = event.target.dataset.do;
      if (!action) return;
      this.select(index, false);
      this.goTo(action);
    });
  }

  // Shows a cause's moments in the lanes; -1 shows none. From the lanes, its text is opened as well.
  select(index, fromLanes) {
    if (fromLanes && index === this.figure.selected) index = -1;
    this.at = -1;
    this.causes.forEach((cause, row) => {
      cause.classList.toggle("selected", row === index);
      if (fromLanes && row === index) {
        cause.open = true;
        cause.scrollIntoView({ block: "nearest" });
      }
    });
    this.figure.select(index);
  }

  goTo(action) {
    const { figure } = this;
    const moments = momentsOf(figure.causes[figure.selected]);
    if (!moments.length) return;
    if (action === "longest-moment") {
      this.at = moments.reduce((best, item, row) => (item.end - item.begin > moments[best].end - moments[best].begin ? row : best), 0);
    } else {
      const by = action === "next-moment" ? 1 : -1;
      const from = this.at < 0 && by < 0 ? moments.length : this.at;
      this.at = (from + by + moments.length) % moments.length;
    }
    const { begin, end, kind } = moments[this.at];
    const around = Math.max(end - begin, 1000);
    figure.show(begin - around, end + around);
    const what = `${figure.causes[figure.selected].name}: ${kind}, moment ${this.at + 1} of ${moments.length}`;
    figure.details.replaceChildren(...lines(what, `begins ${formatMs(begin, 6)} ms, lasts ${formatLength(end - begin)}`));
  }
}

function momentsOf(cause) {
  const rows = (times, kind) => Array.from(times.begin, (begin, row) => ({ begin, end: times.end[row], kind }));
  return [...rows(cause.lost, "overlap lost"), ...rows(cause.idle, "idle")].sort((a, b) => a.begin - b.begin);
}

async function copy(button) {
  const code = button.parentElement.querySelector("pre");
  let copied = false;
  try {
    await navigator.clipboard.writeText(code.textContent);
    copied = true;
  } catch {
    // a page from the disk may not be allowed to: select the code and ask the old way
    getSelection().selectAllChildren(code);
    copied = document.execCommand("copy");
  }
  button.textContent = copied ? "Copied" : "Selected";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Sections are built when they come near the screen: a folder of many ranks opens as fast as one.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((item) => item.isIntersecting)) {
    near.unobserve(entry.target);
    new Section(entry.target);
  }
}, { rootMargin: "600px" });
for (const element of document.querySelectorAll("section.report")) near.observe(element);

document.addEventListener("click", (event) => {
  if (event.target.dataset.do === "copy") copy(event.target);
});
addEventListener("beforeprint", () => {
  for (const cause of document.querySelectorAll("details")) cause.open = true;
});
