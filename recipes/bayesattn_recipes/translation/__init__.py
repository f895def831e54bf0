"""German to English with an LSTM encoder-decoder: the paper's translation experiment and its rivals."""
