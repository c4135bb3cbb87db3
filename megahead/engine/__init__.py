"""DeepSpeed behind one interface; nothing else imports it."""
