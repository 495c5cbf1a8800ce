// A button that copies a command, or shows it where the page has no clipboard (it needs https or localhost).
function render({ model, el }) {
  const button = Object.assign(document.createElement("button"), { className: "jupyter-button" });
  const message = document.createElement("code");
  message.style = "display:block;white-space:pre-wrap;overflow-wrap:anywhere";
  message.setAttribute("role", "status");
  button.textContent = model.get("label");
  button.addEventListener("click", async () => {
    const command = model.get("command");
    message.textContent = command;
    try {
      await navigator.clipboard.writeText(command);
      message.textContent = `Copied: ${command}`;
    } catch { /* the command is shown */ }
  });
  const put = () => { button.title = model.get("command"); message.textContent = ""; };
  model.on("change:command", put);
  put();
  el.append(button, message);
}
export default { render };
