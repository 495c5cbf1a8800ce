const make = (tag, style, values = {}) => Object.assign(document.createElement(tag), { style, ...values });

// A name, a range input over numbers or a list of words, and the number. In a narrow place the name stands above.
function render({ model, el }) {
  const row = make("div", "display:flex;flex-wrap:wrap;align-items:center;gap:0 8px;min-height:32px;margin:0 2px");
  const name = make("span", "flex:1 0 140px;cursor:help;text-decoration:underline dotted");
  const place = make("span", "display:flex;align-items:center;flex:1.4 0 190px;min-width:0;gap:8px");
  const words = model.get("words");
  const input = make(words ? "select" : "input", "flex:1;min-width:0;width:100%;height:28px");
  const shown = make("output", "flex:none;min-width:56px");
  if (!words) Object.assign(input, { type: "range", min: 0, step: 1 });
  input.dataset.lmSuppressShortcuts = "true";  // JupyterLab would take the arrow keys for its own
  const index = () => words ? input.selectedIndex : input.valueAsNumber;
  const spell = () => {
    if (words) return;
    shown.textContent = model.get("spelled")[index()];
    input.setAttribute("aria-valuetext", shown.textContent);
  };
  const put = () => {
    const spelled = model.get("spelled");
    name.textContent = model.get("description");
    row.title = model.get("tooltip");
    input.setAttribute("aria-label", name.textContent);
    input.setAttribute("aria-description", row.title);
    if (words) input.replaceChildren(...spelled.map((word) => new Option(word)));
    else input.max = spelled.length - 1;
    if (words) input.selectedIndex = model.get("index");
    else input.value = model.get("index");
    spell();
  };
  const send = () => {
    model.set("index", index());
    model.save_changes();
  };
  input.addEventListener("input", () => { spell(); if (model.get("continuous_update")) send(); });
  input.addEventListener("change", send);
  model.on("change", put);
  put();
  place.append(input, ...(words ? [] : [shown]));
  row.append(name, place);
  el.append(row);
}
export default { render };
