"""Elementwise half of an LSTM cell as one kernel each way; on a GPU its dozen small ones cost more to launch than to run."""
