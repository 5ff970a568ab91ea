"""Which of the rows that wait become the batch of a step."""
