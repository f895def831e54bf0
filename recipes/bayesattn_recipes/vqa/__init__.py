"""Visual question answering with MCAN: VQA-v2, DAQUAR, and a generated world of shapes."""
