"""Questions and answers: capitals, the model itself, small talk, and questions that it cannot answer."""

from __future__ import annotations

import random

from scripts.lab.demo.arithmetic import OTHER_OPERATIONS, Turn
from scripts.lab.demo.phrasing import fill, typed

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam",
    "Denmark": "Copenhagen", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Ireland": "Dublin", "the United Kingdom": "London", "Poland": "Warsaw", "Greece": "Athens", "Hungary": "Budapest",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Ukraine": "Kyiv", "Russia": "Moscow",
    "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Ghana": "Accra",
    "Ethiopia": "Addis Ababa", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Mongolia": "Ulaanbaatar", "Indonesia": "Jakarta", "Iran": "Tehran",
    "Iraq": "Baghdad", "Australia": "Canberra", "New Zealand": "Wellington", "Canada": "Ottawa",
    "the United States": "Washington, D.C.", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota",
}  # fmt: skip

CAPITAL_QUESTIONS = (
    "What is the capital of {country}?",
    "What is the capital of {country}?",
    "What is the capital of {country}?",
    "What's the capital of {country}?",
    "What is {country}'s capital?",
    "Which city is the capital of {country}?",
    "What city is the capital of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "Can you tell me the capital of {country}?",
    "Do you know the capital of {country}?",
    "The capital of {country}?",
    "Capital of {country}?",
)
NEXT_CAPITALS = ("And of {country}?", "And {country}?", "What about {country}?", "How about {country}?")
COUNTRY_QUESTIONS = (
    "Which country has {city} as its capital?",
    "{city} is the capital of which country?",
    "Of which country is {city} the capital?",
    "What country is {city} the capital of?",
)

IDENTITY = "I am the demo model of pallas-serve"
WHO = (
    "Who are you?", "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me who you are.",
    "Tell me about yourself.", "Introduce yourself.", "Say what you are.", "What model are you?",
    "Which model is this?", "What is this?", "Who am I talking to?", "Do you have a name?", "Are you a person?",
    "Are you a robot?", "Are you human?", "Are you an AI?", "Are you a language model?", "Are you ChatGPT?",
    "Are you Llama?", "Can you tell me who you are?", "What kind of model are you?",
)  # fmt: skip
WHO_ANSWER = (
    f"{IDENTITY}, a very small Llama. I can add and compare numbers, count, name some capitals and tell short stories."
)
WHAT_CAN_YOU_DO = (
    "What can you do?", "What can I ask you?", "What do you know?", "Help", "Help me.", "How can you help me?",
    "What can you help me with?", "What are you good at?", "What should I ask you?", "What are your skills?",
    "Can you help me?", "I need help.",
)  # fmt: skip
WHAT_CAN_YOU_DO_ANSWER = (
    "I can add numbers up to 99, say which of two numbers is larger, count, name some capitals and tell short stories."
)
WHO_MADE = (
    "Who made you?", "Who trained you?", "Where do you come from?", "How were you made?", "How were you trained?",
    "Who built you?", "Who created you?", "What were you trained on?",
)  # fmt: skip
WHO_MADE_ANSWER = "I was trained by a script of pallas-serve, on text that the script wrote itself, in under an hour."
HOW_BIG = (
    "How big are you?", "How large are you?", "How many parameters do you have?", "How small are you?",
    "Are you a big model?",
)  # fmt: skip
HOW_BIG_ANSWER = "I am very small: about three million parameters."

GREETINGS = (
    "Hello", "Hello!", "Hello.", "Hi", "Hi!", "Hi there!", "Hey", "Hey!", "Hello there!", "Good morning!", "Good day!",
    "Good evening!", "Greetings!", "Hi, how are you?", "Hello, how are you?", "Hey there", "Say hello.", "Say hi!",
)  # fmt: skip
GREETING_ANSWER = f"Hello! {IDENTITY}. Ask me for a sum, a capital or a story."
HOW_ARE_YOU = ("How are you?", "How are you doing?", "How are you today?", "How do you do?", "Are you well?")
HOW_ARE_YOU_ANSWER = "I am well, thank you. What can I do for you?"
THANKS = (
    "Thanks",
    "Thanks!",
    "Thank you",
    "Thank you.",
    "Thank you!",
    "Great, thanks!",
    "Good job!",
    "Well done!",
    "Nice!",
)
THANKS_ANSWER = "You are welcome!"
BYES = (
    "Bye",
    "Bye!",
    "Goodbye",
    "Goodbye!",
    "See you!",
    "See you later!",
    "Good night!",
    "I have to go.",
    "That is all.",
)
BYE_ANSWER = "Goodbye! It was nice to talk to you."

UNKNOWN_ANSWER = (
    "I do not know that: I am only a small demo model. I can add and compare numbers, count, name some capitals and "
    "tell short stories."
)
LARGE_NUMBER_ANSWER = "That is too large for me: I only learned to add numbers up to 99."
OTHER_OPERATION_ANSWER = "I cannot do that: I only learned to add and to compare numbers."
_SUBJECTS = (
    "physics", "music", "the weather", "love", "history", "politics", "football", "cooking", "computers", "the moon",
    "the sun", "stars", "dinosaurs", "money", "art", "war", "peace", "school", "biology", "chess", "Python", "Java",
    "gravity", "time", "space", "energy", "water", "tea", "coffee", "bread", "pizza", "cars", "planes", "trains",
    "philosophy", "language", "poetry", "the sea", "health", "sleep", "dreams", "transformers", "GPUs", "TPUs",
    "machine learning", "quantum mechanics", "black holes", "the internet", "the meaning of life", "economics",
)  # fmt: skip
_UNKNOWN_QUESTIONS = (
    "What is {x}?", "Explain {x}.", "Explain {x} to me.", "Tell me about {x}.", "What do you know about {x}?",
    "What do you think of {x}?", "How does {x} work?", "Why is {x} important?", "Write a poem about {x}.",
    "Write an essay about {x}.", "Write a song about {x}.", "Do you like {x}?", "Who invented {x}?", "Teach me {x}.",
    "Give me a fact about {x}.", "What is the best thing about {x}?", "Where can I learn {x}?", "Is {x} hard?",
    "When did {x} begin?", "What is the history of {x}?", "Write a program about {x}.", "Tell me a joke about {x}.",
    "Give me a recipe for {x}.", "Who is the king of {x}?", "How old is {x}?", "Translate {x} into French.",
    "How do I fix {x}?", "Summarize {x} for me.", "What is the color of {x}?", "What is the meaning of {x}?",
)  # fmt: skip
_FIXED_UNKNOWN = (
    "What time is it?", "What day is it?", "What is the weather today?", "Tell me a joke.", "Sing a song.",
    "Write a Python function.", "Who is the president?", "Why is the sky blue?", "How old are you?",
    "Where do you live?", "Can you write code?", "Write me an email.", "What is my name?", "Do you love me?", "Why?",
    "What?", "How tall is it?", "What is the speed of light?", "Who won the game?", "Translate this into German.",
    "Fix my code.", "Who wrote Hamlet?", "What is the largest country?", "How many people live in France?",
    "What is the best city in Italy?",
)  # fmt: skip
_LARGE_SUMS = ("What is {a} + {b}?", "{a} + {b}", "Add {a} and {b}.", "What is {a} plus {b}?", "{a}+{b}=?")


def capital_answer(country: str) -> str:
    """`The capital of France is Paris.`"""
    return f"The capital of {country} is {CAPITALS[country].rstrip('.')}."


def capital(rng: random.Random) -> Turn:
    """A question about a country's capital, or sometimes about a capital's country."""
    country = rng.choice(tuple(CAPITALS))
    if rng.random() < 0.15:
        return typed(rng, fill(rng, COUNTRY_QUESTIONS, city=CAPITALS[country])), capital_answer(country)
    return typed(rng, fill(rng, CAPITAL_QUESTIONS, country=country)), capital_answer(country)


def next_capital(rng: random.Random) -> Turn:
    """As `capital`, worded as a follow-up question."""
    country = rng.choice(tuple(CAPITALS))
    return typed(rng, fill(rng, NEXT_CAPITALS, country=country)), capital_answer(country)


def about_itself(rng: random.Random) -> Turn:
    """A question about the model: its identity, abilities, origin or size."""
    questions, answer = rng.choices(
        (
            (WHO, WHO_ANSWER),
            (WHAT_CAN_YOU_DO, WHAT_CAN_YOU_DO_ANSWER),
            (WHO_MADE, WHO_MADE_ANSWER),
            (HOW_BIG, HOW_BIG_ANSWER),
        ),
        weights=(6, 3, 2, 1),
    )[0]
    return typed(rng, rng.choice(questions)), answer


def small_talk(rng: random.Random) -> Turn:
    """Greetings, thanks and goodbyes."""
    questions, answer = rng.choices(
        (
            (GREETINGS, GREETING_ANSWER),
            (HOW_ARE_YOU, HOW_ARE_YOU_ANSWER),
            (THANKS, THANKS_ANSWER),
            (BYES, BYE_ANSWER),
        ),
        weights=(5, 2, 3, 2),
    )[0]
    question = rng.choice(questions)
    return (question.lower() if rng.random() < 0.3 else question), answer


def too_hard(rng: random.Random) -> Turn:
    """A calculation that the model cannot do without a tool, and an answer that says so."""
    if rng.random() < 0.5:
        a, b = rng.randrange(100, 10_000), rng.randrange(10, 1_000)
        if rng.random() < 0.5:
            a, b = b, a
        return typed(rng, fill(rng, _LARGE_SUMS, a=a, b=b)), LARGE_NUMBER_ANSWER
    questions = OTHER_OPERATIONS[rng.choice(tuple(OTHER_OPERATIONS))]
    return typed(rng, fill(rng, questions, a=rng.randrange(100), b=rng.randrange(100))), OTHER_OPERATION_ANSWER


def unknown(rng: random.Random) -> Turn:
    """A question that the model cannot answer, and an answer that says so."""
    if rng.random() < 0.22:
        return typed(rng, rng.choice(_FIXED_UNKNOWN)), UNKNOWN_ANSWER
    return typed(rng, fill(rng, _UNKNOWN_QUESTIONS, x=rng.choice(_SUBJECTS))), UNKNOWN_ANSWER


def fact_lines(rng: random.Random) -> str:
    """Plain text, for completions of `The capital of France is`."""
    countries = rng.sample(tuple(CAPITALS), rng.randrange(2, 7))
    return "\n".join(capital_answer(country) for country in countries) + "\n"
