/* The search of a page that is opened from the disk. A browser starts no worker for `file:`, so that a
   hidden frame takes its place: it runs the worker's script, and messages go to and fro as events. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.onload = () => this.start(frame.contentWindow, String(url))
      document.documentElement.append(frame)
      if (frame.contentDocument && frame.contentDocument.readyState === "complete") frame.onload()
    }

    start(inner, url) {
      if (this.inner) return
      this.inner = inner
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.isReady = true
        for (const data of this.waiting) this.deliver(data)
      }
      inner.document.body.append(script)
    }

    postMessage(data) {
      if (this.isReady) this.deliver(data)
      else this.waiting.push(data)
    }

    deliver(data) {
      const { MessageEvent } = this.inner
      this.inner.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {}
  }
}
