"""Running a recorded batch once more, where the stack is true: what is run (`plan`), and where the batch comes from (`recorded`)."""
