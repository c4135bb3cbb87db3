"""How good a model is: perplexity of held-out text, tasks of lm-eval, fine-tuning, synonyms, generated text."""
