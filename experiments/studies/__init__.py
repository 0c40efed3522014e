"""Studies: many trainings on one corpus, each in a folder of its own."""
