"""What customers of a shop write about, and how each of the three adapters answers.

A topic holds message templates and, for each adapter, what a good answer contains. `{item}` is
a product; without one, `{your}` is "your order" and `{the}` is "the item". The trainer
combines these; nothing here is a held-out question.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """One kind of message with its classification, the brand's reply and the three steps.

    A reply names its topic first (`about`): a small model that has to commit to a topic before
    the polite words stays with it.
    """

    intent: str
    urgency: str
    messages: tuple[str, ...]
    about: str
    reply: str
    steps: tuple[tuple[str, str, str], ...]


DAMAGED = Topic(
    intent="damaged",
    urgency="high",
    messages=(
        "My {item} arrived broken.",
        "The {item} was smashed when I opened the box.",
        "The {item} you sent has a big crack in it.",
        "My new {item} came with a torn seam.",
        "The {item} stopped working after one day.",
        "The {item} is faulty and will not turn on.",
        "I unpacked the {item} and it is scratched all over.",
        "There is a hole in the {item} I just received.",
        "The box was crushed and the {item} inside is damaged.",
        "The {item} fell apart the first time I used it.",
        "My {item} is defective.",
        "Everything in the box was broken.",
        "My parcel was damaged on the way.",
        "The delivery came in pieces.",
        "What I received is broken.",
        "My order is damaged.",
        "My order came in pieces, what now?",
        "The whole order got here broken.",
        "My order was broken when I opened it.",
        "The package arrived wet and the contents are ruined.",
        "It broke on the first day.",
        "My purchase arrived damaged, what should I do?",
    ),
    about="the damage to {your}",
    reply=(
        "I am sorry! Please send us a photo, and we will ship a free replacement within 2 "
        "days. You do not need to send anything back."
    ),
    steps=(
        (
            "Take a clear photo of the damage and the box.",
            "Send the photo to support with your order number.",
            "Choose a free replacement or your money back.",
        ),
        (
            "Keep {the} and all the packaging.",
            "Photograph the damage from two sides.",
            "Send the photos to support and ask for a replacement.",
        ),
    ),
)

LATE = Topic(
    intent="order_status",
    urgency="normal",
    messages=(
        "Where is my {item}?",
        "My {item} still has not arrived.",
        "I ordered a {item} last week and have heard nothing.",
        "The {item} should have come on {day}.",
        "Can you tell me when the {item} will be delivered?",
        "When will my {item} get here?",
        "Has my {item} been shipped yet?",
        "Where is my order?",
        "My package was due on {day} and it is not here.",
        "The tracking has not changed since {day}.",
        "Order {number} is late.",
        "What is the status of order {number}?",
        "My delivery has not arrived.",
        "I am still waiting for my parcel from {day}.",
        "The tracking link does not work.",
        "Can you track order {number} for me?",
        "It says delivered but I have nothing.",
        "How long until my package comes?",
    ),
    about="the delivery of {your}",
    reply=(
        "Most orders arrive in 3 to 5 days, and the tracking link in your shipping email "
        "shows where yours is. If it has not moved for 2 days, we will send it again for "
        "free."
    ),
    steps=(
        (
            "Open the tracking link in your shipping email.",
            "Ask your neighbors and check your mailbox.",
            "Write to support if nothing arrives by tomorrow.",
        ),
        (
            "Check the tracking number in your account.",
            "Wait one more working day for the delivery.",
            "Contact support with your order number if it is still missing.",
        ),
    ),
)

RETURN = Topic(
    intent="return",
    urgency="normal",
    messages=(
        "I want to return a {item}.",
        "The {item} does not fit me.",
        "The {item} is too big, can I swap it?",
        "How can I return the {item} I bought?",
        "The {item} is the wrong size for me.",
        "I changed my mind about the {item}.",
        "Can I exchange my {item} for a larger one?",
        "I do not like the {item} and want to give it back.",
        "My {item} is too tight. How do I swap sizes?",
        "What is your return policy?",
        "How many days do I have to return something?",
        "How do I get a return label?",
        "Can I send something back without the box?",
        "It does not fit. How do returns work?",
        "Is returning an order free?",
        "I would like to exchange my order for another size.",
        "I bought the wrong size of {item}.",
        "Can I bring back a {item} after two weeks?",
    ),
    about="returning {your}",
    reply=(
        "Returns and exchanges are free for 30 days. Print the label from your account, pack "
        "everything in any box, and drop it at the post office."
    ),
    steps=(
        (
            "Print the free return label from your account.",
            "Pack {the} in a box and stick the label on it.",
            "Drop the box at the post office within 30 days.",
        ),
        (
            "Open your account and choose the order.",
            "Pick return or exchange and print the label.",
            "Send {the} back within 30 days.",
        ),
    ),
)

REFUND = Topic(
    intent="refund",
    urgency="normal",
    messages=(
        "Where is my refund?",
        "I sent back the {item} and have no money yet.",
        "When do I get my money back for the {item}?",
        "I want a refund for my {item}.",
        "My refund has not arrived after ten days.",
        "How long does a refund take?",
        "You promised me a refund on {day}.",
        "I would like my money back.",
        "The refund for the {item} is missing.",
        "Can I get a refund instead of store credit?",
        "I returned my order but nobody paid me back.",
        "Give me my money back for the {item}.",
        "How do I ask for a refund?",
        "My bank does not show the refund yet.",
        "I am waiting for the refund of order {number}.",
        "Has my {item} refund been sent?",
        "When will I get the money for the {item}?",
        "I sent the {item} back, so where is my money?",
        "When will you pay me for the {item} I returned?",
    ),
    about="the refund for {your}",
    reply=(
        "We pay it to your card within 5 days after the return reaches us, and you get an "
        "email when it is sent."
    ),
    steps=(
        (
            "Check that the return was delivered to us.",
            "Wait 5 days and look at your card statement.",
            "Write to support with your order number if it is missing.",
        ),
        (
            "Find the refund email in your inbox.",
            "Compare the amount with your bank statement.",
            "Contact support if the money is not there after 5 days.",
        ),
    ),
)

DOUBLE_CHARGE = Topic(
    intent="billing",
    urgency="high",
    messages=(
        "I was charged twice for the {item}.",
        "You took the money two times for my {item}.",
        "There are two payments for one order on my card.",
        "My bank shows a double charge from you.",
        "I paid for the {item} but was billed again on {day}.",
        "Why did you charge me more than the price of the {item}?",
        "The amount on my card is wrong.",
        "There is a payment from your shop that I do not know.",
        "You charged me for something I never bought.",
        "I see a duplicate payment for order {number}.",
        "My card was billed three times.",
        "The discount was not taken off the price of my {item}.",
        "I have been overcharged.",
        "You billed me twice on {day}.",
        "The invoice for the {item} is wrong.",
    ),
    about="the payment for {your}",
    reply=(
        "I am sorry! Please reply with your order number and the dates of the charges. We "
        "give extra charges back within 3 days."
    ),
    steps=(
        (
            "Write down the dates and amounts of both payments.",
            "Send them to support with your order number.",
            "Check your card again in 3 days for the money.",
        ),
        (
            "Check whether one of the payments is only pending.",
            "Send a screenshot of the charges to support.",
            "Call your bank if nothing changes within 3 days.",
        ),
    ),
)

INVOICE = Topic(
    intent="billing",
    urgency="low",
    messages=(
        "Can I have an invoice for my {item}?",
        "I need a receipt for order {number}.",
        "Please send me the bill for the {item}.",
        "Which payment methods do you take?",
        "Can I pay with a gift card?",
        "Can I pay for a {item} in two parts?",
        "My company needs an invoice with our tax number.",
        "Where do I find my receipt?",
        "My card is declined at checkout.",
        "The coupon code does not work.",
        "Do you accept bank transfer?",
        "How do I use my discount code?",
    ),
    about="invoices and payment options",
    reply=(
        "You find them in your account under Payments. We take cards, gift cards and bank transfer."
    ),
    steps=(
        (
            "Log in and open Payments in your account.",
            "Choose the order and the option you need.",
            "Contact support if something is missing there.",
        ),
    ),
)

ACCOUNT = Topic(
    intent="account",
    urgency="normal",
    messages=(
        "I cannot log in.",
        "I lost my password.",
        "How do I reset my password?",
        "My account is locked.",
        "The password reset email never came.",
        "I can't log in to my account any more.",
        "I can not remember the password of my account.",
        "The login page says my password is wrong.",
        "I do not remember my login.",
        "I cannot sign in since {day}.",
        "The app does not accept my password.",
        "I need a new password for my account.",
    ),
    about="your login",
    reply=(
        "Choose Forgot password on the login page, and we will email you a new link within 5 "
        "minutes. Please look in your spam folder too."
    ),
    steps=(
        (
            "Open the login page and choose Forgot password.",
            "Follow the link in the email and check spam too.",
            "Set a new password and log in again.",
        ),
        (
            "Go to the login page.",
            "Ask for a reset link with your email address.",
            "Write to support if no email comes in 5 minutes.",
        ),
    ),
)

ACCOUNT_DATA = Topic(
    intent="account",
    urgency="low",
    messages=(
        "I want to change the email of my account.",
        "How can I delete my account?",
        "How do I make an account?",
        "Please change my phone number.",
        "How do I stop your newsletter?",
        "I have a new last name, can you update my account?",
        "Where can I see what data you have about me?",
        "How do I close my account?",
        "Can I use one account for two people?",
        "I get too many emails from you.",
    ),
    about="your account settings",
    reply=(
        "You can change your data or close your account in a minute. Log in and open "
        "Settings. Reply here if something does not work."
    ),
    steps=(
        (
            "Log in and open Settings.",
            "Make the change and save it.",
            "Confirm it with the link in the email.",
        ),
    ),
)

CANCEL = Topic(
    intent="cancel",
    urgency="high",
    messages=(
        "Please cancel my order.",
        "I want to cancel the {item}.",
        "Cancel order {number}, please.",
        "I ordered the {item} by mistake, please stop it.",
        "Can I still cancel my {item}?",
        "I do not need the {item} any more, cancel it.",
        "How do I cancel an order?",
        "Is it too late to cancel?",
        "I clicked buy twice, please cancel one {item}.",
        "Stop my order from {day} before it ships.",
        "I found a cheaper {item} and want to cancel.",
        "Cancel everything I bought on {day}.",
        "I would like to cancel my purchase.",
        "Please do not send the {item}, I made a mistake.",
    ),
    about="canceling {your}",
    reply=(
        "We can stop it until it leaves our warehouse, and you get all your money back within "
        "3 days. Please reply with your order number."
    ),
    steps=(
        (
            "Open your account and find the order.",
            "Press Cancel before the order is shipped.",
            "If it is too late, send it back for free.",
        ),
        (
            "Have your order number ready.",
            "Ask support to stop the order now.",
            "Check your email for the confirmation.",
        ),
    ),
)

WRONG_ITEM = Topic(
    intent="wrong_item",
    urgency="normal",
    messages=(
        "You sent me the wrong {item}.",
        "I ordered a {item} and got something else.",
        "I received a {color} {item} but I asked for another color.",
        "The {item} in the box is not the one I ordered.",
        "This is not my order.",
        "I got somebody else's parcel.",
        "You sent a {color} {item}, but I chose a different one.",
        "The box has the wrong things in it.",
        "I bought a {item} and you delivered a {other}.",
        "The wrong size of {item} was in my package.",
        "I got two of the {item} but ordered one.",
        "I got a {color} {item}, but I ordered the {color2} one.",
        "The {item} that came is {color}, and I wanted a {color2} one.",
    ),
    about="the mix-up with {your}",
    reply=(
        "I am sorry! We will send the right one today for free. Please keep the wrong one "
        "until we email you a return label."
    ),
    steps=(
        (
            "Compare the box with your order email.",
            "Send support a photo of what you received.",
            "Use the free label to send the wrong item back.",
        ),
        (
            "Keep the wrong item unused in its box.",
            "Tell support your order number and what came.",
            "Wait for the right item and a return label.",
        ),
    ),
)

MISSING = Topic(
    intent="wrong_item",
    urgency="normal",
    messages=(
        "There is one {item} missing from my order.",
        "My order is not complete, the {item} is missing.",
        "Half of my order is missing.",
        "You forgot to pack the {item}.",
        "I paid for two things and only got the {item}.",
        "The box was empty.",
        "Some parts of the {item} are missing.",
        "The {item} was not in the parcel.",
        "One thing is missing from order {number}.",
    ),
    about="what is missing from your order",
    reply=(
        "I am sorry! Reply with your order number and what you did not get, and we will send "
        "it today for free."
    ),
    steps=(
        (
            "Check the box and the packing list once more.",
            "See in your email whether a second parcel is coming.",
            "Tell support your order number and what is missing.",
        ),
    ),
)

ORDER_CHANGE = Topic(
    intent="order_change",
    urgency="high",
    messages=(
        "I need to change the delivery address of my order.",
        "I typed the wrong address for my {item}.",
        "Can I change the color of my {item} before it ships?",
        "Please add a {item} to order {number}.",
        "I moved house, please send the {item} to my new address.",
        "Can you deliver on {day} instead?",
        "I want a bigger size for the {item} I just ordered.",
        "Can I still change my order?",
        "Please change the quantity of my {item} to two.",
        "The address on order {number} is wrong.",
        "Can you send my order to my office?",
        "Can I pick up my {item} in a shop instead?",
    ),
    about="changing {your}",
    reply=(
        "We can do that until it leaves our warehouse. Please reply with your order number "
        "and what you would like instead."
    ),
    steps=(
        (
            "Open the order in your account.",
            "Press Edit and enter the change.",
            "Write to support at once if it already shipped.",
        ),
    ),
)

SHIPPING = Topic(
    intent="shipping",
    urgency="low",
    messages=(
        "Do you ship to {country}?",
        "Can you send a {item} to {country}?",
        "How much is shipping to {country}?",
        "What does delivery cost?",
        "Do you offer express delivery?",
        "How long does shipping to {country} take?",
        "Is shipping free for a {item}?",
        "Do you deliver on weekends?",
        "Which courier do you use?",
        "Do you deliver to {country} and how long does it take?",
        "Is there a fee for delivery to {country}?",
        "Can I have my order sent to {country}?",
        "Do I pay customs for {country}?",
        "How fast is express delivery?",
        "Do you send orders abroad?",
    ),
    about="shipping",
    reply=(
        "We ship to more than 40 countries. It costs 6 dollars, is free over 60 dollars, and "
        "takes 3 to 5 days at home and 7 to 10 days abroad."
    ),
    steps=(
        (
            "Put the item in your cart and choose your country.",
            "Look at the price and the delivery time shown.",
            "Pick standard or express and place the order.",
        ),
        (
            "Open the shipping page and choose your country.",
            "Compare the cost of standard and express delivery.",
            "Order for more than 60 dollars to ship for free.",
        ),
    ),
)

PRODUCT = Topic(
    intent="product",
    urgency="low",
    messages=(
        "Is the {item} machine washable?",
        "What is the {item} made of?",
        "Does the {item} come in {color}?",
        "How heavy is the {item}?",
        "Is the {item} good for winter?",
        "When will the {item} be back in stock?",
        "Which size of {item} should I buy?",
        "Does the {item} have a warranty?",
        "Can a child use the {item}?",
        "What is the difference between the {item} and the {other}?",
        "Is the {item} safe in the rain?",
        "How do I clean the {item}?",
        "Do you sell a {color} {item}?",
        "Do you have a size chart?",
        "How long does the {item} last?",
        "Is the {item} easy to carry?",
    ),
    about="{the} in our shop",
    reply=(
        "Its product page lists the material, sizes and care, and it has a 2 year warranty. "
        "You can try it at home for 30 days."
    ),
    steps=(
        (
            "Open the product page of {the}.",
            "Read the details, sizes and reviews.",
            "Ask support if your question is still open.",
        ),
        (
            "Check the label and the product page.",
            "Compare {the} with what you need.",
            "Try it at home and send it back within 30 days if needed.",
        ),
    ),
)

FEEDBACK = Topic(
    intent="feedback",
    urgency="low",
    messages=(
        "I love my new {item}.",
        "The {item} is great, thank you!",
        "Your service is very slow.",
        "Your website is hard to use.",
        "The {item} is the best I ever had.",
        "I am disappointed with the {item}.",
        "Your team was so friendly.",
        "The courier was rude.",
        "Great shop, I will buy again.",
        "I am not happy with your shop.",
        "Too much plastic in your packaging.",
        "Thanks for the fast delivery.",
        "I think the {item} is too expensive.",
        "Nobody answers the phone at your shop.",
    ),
    about="how we are doing",
    reply=(
        "We read every message, and I will pass your words to the team today. It helps us to "
        "do better."
    ),
    steps=(
        (
            "Write your feedback in the review form.",
            "Add your order number so we can look into it.",
            "Expect an answer from the team within 2 days.",
        ),
    ),
)

TOPICS = (
    DAMAGED,
    LATE,
    RETURN,
    REFUND,
    DOUBLE_CHARGE,
    INVOICE,
    ACCOUNT,
    ACCOUNT_DATA,
    CANCEL,
    WRONG_ITEM,
    MISSING,
    ORDER_CHANGE,
    SHIPPING,
    PRODUCT,
    FEEDBACK,
)
