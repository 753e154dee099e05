"""The vLLM engine: vLLM runs in a process of its own, under an interpreter of its own.

`engine`, `process` and the buckets are the side of rlflow. `worker` and `transfer` are vLLM's: they run where rlflow is not
installed, as the package `rlflow_vllm`, and may import the standard library, vLLM, what it depends on, and `frames`."""
