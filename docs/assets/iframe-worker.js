/* Browsers refuse workers in pages that are opened as files. Search runs in a hidden frame there. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      this.ready = new Promise((resolve) => {
        inside.loaded = resolve;
      });
      inside.document.open();
      inside.document.write(
        "<script>" +
          "const send = parent.postMessage.bind(parent);" +
          "window.receive = window.postMessage.bind(window);" +
          "window.postMessage = (data) => send(data, '*');" +
          `</script><script src="${url}" onload="loaded()"></script>`,
      );
      inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.receive(data, "*"));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
