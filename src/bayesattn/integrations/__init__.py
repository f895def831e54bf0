"""Other libraries' models and training loops: transformers, PyTorch Geometric, Lightning. Each is imported on its own."""
