"""Running a recorded batch once more, where the stack is true."""
