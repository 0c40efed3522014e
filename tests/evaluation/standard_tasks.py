"""Fake data in the schemas of lm-eval's tasks, which download their data."""

import datasets

QUESTIONS = {
    "question": ["Which is the word", "Which is the letter"],
    "choices": [{"text": ["the", "of", "an"], "label": ["A", "B", "C"]}] * 2,
    "answerKey": ["B", "A"],
}
ROWS = {
    ("EleutherAI/lambada_openai", "default"): {"text": ["the cat saw the cat", "a dog is a dog"]},
    ("Rowan/hellaswag", None): {
        "activity_label": ["Running", "Cooking"],
        "ctx_a": ["A man runs.", "A pan is hot."],
        "ctx_b": ["he", "it"],
        "endings": [["stops.", "eats.", "sings.", "[title] flies."]] * 2,
        "label": ["0", "2"],
    },
    ("allenai/winogrande", "winogrande_xl"): {
        "sentence": ["Ann saw Bo as _ was there.", "Cy met Di because _ came."],
        "option1": ["Ann", "Cy"],
        "option2": ["Bo", "Di"],
        "answer": ["1", "2"],
    },
    ("baber/piqa", None): {
        "goal": ["Cut it", "Dry it"],
        "sol1": ["with a knife", "with water"],
        "sol2": ["with soup", "with air"],
        "label": [0, 1],
    },
    ("allenai/ai2_arc", "ARC-Easy"): QUESTIONS,
    ("allenai/ai2_arc", "ARC-Challenge"): QUESTIONS,
    ("aps/super_glue", "boolq"): {
        "passage": ["Ice is cold.", "Fire is hot."],
        "question": ["is ice cold", "is fire cold"],
        "label": [1, 0],
    },
    ("allenai/openbookqa", "main"): {
        "question_stem": QUESTIONS["question"],
        "choices": QUESTIONS["choices"],
        "answerKey": QUESTIONS["answerKey"],
    },
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): {
        "page": [" = The = \n the of ( the ) \n", " = Of = \n of the , of \n"]
    },
    ("google-research-datasets/nq_open", None): {
        "question": ["who is it", "what is it"],
        "answer": [["the", "of"], ["an"]],
    },
}


def load_dataset(path, name=None, **kwargs) -> datasets.DatasetDict:
    """Replaces `datasets.load_dataset`: returns the same `ROWS` in every split."""
    rows = datasets.Dataset.from_dict(ROWS[path, name])
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
