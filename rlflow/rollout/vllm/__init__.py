"""The vLLM engine: `vllm serve`, started as a child of this process or found at a URL.

`inside` runs under vLLM's interpreter, all else under this one, which never imports vLLM."""
