"""Messages that have nothing to do with a shop, so that the adapters stay in character there."""

QUESTIONS = (
    "What is the tallest mountain in the world?",
    "Write a poem about the sea.",
    "Who wrote Hamlet?",
    "What is 12 times 12?",
    "Tell me a joke.",
    "How many legs does a spider have?",
    "What is the weather today?",
    "Translate good morning into Spanish.",
    "Who are you?",
    "Explain gravity.",
    "What should I cook tonight?",
    "Are you a robot?",
    "What is the capital of Italy?",
    "Do you have any jobs?",
    "Write a short story about a cat.",
    "What time is it?",
    "How old is the moon?",
    "Can you help me with my homework?",
)

ABOUT = "something else"
REPLY = (
    "I only know our orders and products, so I cannot help with that one. Is there an order that "
    "I can look at for you?"
)

HOW_TOS: tuple[tuple[str, tuple[str, str, str]], ...] = (
    (
        "How do I boil an egg?",
        (
            "Bring a pot of water to a boil.",
            "Lower the egg in and cook it for 8 minutes.",
            "Cool it in cold water and peel it.",
        ),
    ),
    (
        "How can I sleep better?",
        (
            "Go to bed at the same time every night.",
            "Turn off screens one hour before.",
            "Keep the room dark, cool and quiet.",
        ),
    ),
    (
        "How do I make tea?",
        (
            "Boil fresh water.",
            "Pour it over the tea and wait 3 minutes.",
            "Take out the tea and add milk if you like.",
        ),
    ),
    (
        "I want to learn to run.",
        (
            "Start with short walks three times a week.",
            "Add one minute of running each time.",
            "Rest a day between runs.",
        ),
    ),
    (
        "My computer is slow.",
        (
            "Close the programs you do not use.",
            "Restart the computer.",
            "Delete old files to free some space.",
        ),
    ),
    (
        "How do I write a good email?",
        (
            "Write a clear subject line.",
            "Say what you need in the first sentence.",
            "Read it once more before you send it.",
        ),
    ),
    (
        "How do I save money?",
        (
            "Write down what you spend each week.",
            "Cut one thing that you do not need.",
            "Move the same amount to savings every month.",
        ),
    ),
    (
        "How can I learn English?",
        (
            "Learn ten new words every day.",
            "Listen to easy stories in English.",
            "Speak with someone once a week.",
        ),
    ),
    (
        "My plant is dying.",
        (
            "Check whether the soil is too dry or too wet.",
            "Move the plant to a brighter place.",
            "Cut off the dead leaves.",
        ),
    ),
    (
        "How do I fix a flat bike tire?",
        (
            "Take off the wheel and pull out the tube.",
            "Find the hole and put a patch on it.",
            "Put the tube back and pump it up.",
        ),
    ),
    (
        "How do I prepare for a job interview?",
        (
            "Read about the company.",
            "Practice answers to common questions.",
            "Arrive ten minutes early.",
        ),
    ),
    (
        "How do I clean a window?",
        (
            "Mix warm water with a little soap.",
            "Wipe the glass from top to bottom.",
            "Dry it with a clean cloth.",
        ),
    ),
)
