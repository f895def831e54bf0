"""Language understanding: pretrained encoders fine-tuned with Bayesian attention on GLUE, SQuAD, or texts of your own."""
