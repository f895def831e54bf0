"""Does doubt in closed form find the errors of ordinary fine-tuned models? A study against its rivals and controls."""
