// Search in pages that are opened as files: browsers refuse a Worker at a file: address. This Worker runs its script in a hidden
// frame instead, and passes messages in both directions. On a server, the browser's own Worker stays.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.started = new Promise((resolve) => {
        // Firefox replaces the document of a new frame until "load"; a script that is added before is lost.
        this.frame.addEventListener("load", () => {
          const inner = this.frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = new URL(address, location.href);
          script.onload = () => resolve(inner);
          inner.document.body.append(script);
        }, { once: true });
      });
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.started.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
