"""Words that fill the templates' slots."""

ITEMS = (
    "tent", "sleeping bag", "backpack", "rain jacket", "wool hat",
    "water bottle", "camping stove", "headlamp", "flashlight", "hammock", "fleece", "scarf",
    "climbing rope", "kayak paddle", "bike helmet", "coffee maker", "teapot",
    "frying pan", "kettle", "blender", "toaster", "cutting board", "knife set", "lunch box",
    "desk lamp", "office chair", "bookshelf", "mirror", "rug", "pillow", "blanket", "curtain",
    "wall clock", "picture frame", "vase", "candle", "notebook", "fountain pen", "phone case",
    "charger", "keyboard", "mouse", "speaker", "camera", "tripod",
    "board game", "puzzle", "teddy bear", "toy train", "dog bed", "cat tree", "dress", "t-shirt",
    "sweater", "winter coat", "raincoat for kids", "swimsuit", "belt", "wallet",
    "watch", "ring", "umbrella", "suitcase", "yoga mat", "tennis racket",
)  # fmt: skip

PLURAL_ITEMS = (
    "hiking boots", "gloves", "headphones", "jeans", "sunglasses", "shoes", "socks", "sandals",
    "plates", "scissors", "pajamas", "skis",
)  # fmt: skip

COLORS = ("red", "black", "white", "yellow", "grey", "orange", "purple", "pink")
COUNTRIES = (
    "Canada", "France", "Japan", "Brazil", "Germany", "Australia", "Spain", "Mexico", "Ireland",
    "India", "Poland", "Kenya", "Chile", "Greece", "Finland", "Portugal",
)  # fmt: skip
DAYS = ("Monday", "Wednesday", "Thursday", "Friday", "Saturday", "the 3rd", "May 12", "yesterday")

OPENERS = ("", "", "", "", "Hi, ", "Hello, ", "Hey, ", "Good morning. ", "Hi there. ")
CLOSERS = ("", "", "", "", " Thanks.", " Please help.", " What can I do?", " Can you help?")
CALM_CLOSERS = ("", "", "", " Thanks.")
