"""The words and sentences of the demo's stories. `{They}`, `{them}`, `{their}` are the hero's."""

from __future__ import annotations

GIRLS = ("Mia", "Lily", "Anna", "Zoe", "Nora", "Ella", "Ruby", "Clara", "Emma", "Rosa", "Sara", "Ida")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Finn", "Jack", "Oscar", "Hugo", "Noah", "Paul", "Otto")
ANIMALS = (
    "fox", "rabbit", "bear", "mouse", "cat", "dog", "duck", "frog", "bird", "turtle", "squirrel", "hedgehog", "goat",
    "horse", "pig", "lamb", "deer", "beaver", "badger", "penguin",
)  # fmt: skip
FANTASTIC = ("dragon", "robot", "wizard", "giant", "knight", "king", "princess", "pirate", "farmer", "sailor")
TRAITS = (
    "little",
    "young",
    "kind",
    "brave",
    "shy",
    "clever",
    "quiet",
    "curious",
    "happy",
    "gentle",
    "small",
    "cheerful",
)
PLACES = (
    "in a small village", "near a big forest", "by the sea", "at the edge of a lake", "on a green hill",
    "in a quiet town", "beside a river", "under an old bridge", "in a warm valley", "on a small island",
    "behind the mountains", "in a house with a red door",
)  # fmt: skip
THINGS = (
    "ball",
    "kite",
    "lamp",
    "hat",
    "key",
    "book",
    "boat",
    "bell",
    "drum",
    "basket",
    "map",
    "coat",
    "spoon",
    "flute",
)
COLORS = ("red", "blue", "green", "yellow", "golden", "silver", "white", "purple")
FOODS = ("bread", "soup", "cake", "apples", "berries", "cheese", "honey", "cookies", "pears", "nuts")
TIMES = ("One day", "One morning", "One sunny day", "One afternoon", "One cold morning", "One evening", "One rainy day")
FEELINGS = ("sad", "worried", "afraid", "tired", "lonely")
WEATHERS = ("rain", "wind", "snow", "fog", "thunder")
HIDING = (
    "under a bush",
    "behind a big stone",
    "in the tall grass",
    "under the bed",
    "on top of a wall",
    "in a hollow tree",
)
SEEDS = ("sunflower", "pumpkin", "pear tree", "rose", "carrot", "bean")

OPENINGS = (
    "Once upon a time, there was a {trait} {kind} named {hero}. {They} lived {place}.",
    "Once upon a time, a {trait} {kind} named {hero} lived {place}.",
    "Once there was a {trait} {kind} called {hero} who lived {place}.",
    "There once was a {trait} {kind} named {hero}. {They} lived {place} with {their} family.",
    "Long ago, {place}, there lived a {trait} {kind} named {hero}.",
    "{hero} was a {trait} {kind} who lived {place}.",
)
FRIENDS = (
    "{Their} best friend was a {friend_trait} {friend_kind} named {friend}.",
    "{hero} had a good friend, a {friend_kind} named {friend}.",
    "Every day {they} played with a {friend_kind} named {friend}.",
    "{hero} and {friend} the {friend_kind} were best friends.",
)
PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "a lost {thing}": (
        (
            "{hero} loved {their} {color} {thing} more than anything.",
            "{hero} had a {color} {thing} that {they} took everywhere.",
            "For {their} birthday, {hero} got a {color} {thing}.",
        ),
        (
            "{time}, the {thing} was gone.",
            "{time}, {hero} could not find the {thing}.",
            "{time}, {they} woke up and the {thing} was not there.",
        ),
        (
            "{They} looked in the kitchen and in the garden, but it was nowhere.",
            "{They} looked everywhere and began to feel {feeling}.",
            '"Where is my {thing}?" {they} asked, and felt very {feeling}.',
        ),
        (
            '"I will help you," said {friend}.',
            '{friend} came by and said, "Let us look together."',
            "{hero} told {friend} about it, and they went to look for it.",
        ),
        (
            "They walked a long way, and at last they saw it {hiding}.",
            "After a while, {friend} found it {hiding}.",
            "They looked and looked. There it was, {hiding}!",
        ),
        (
            '"Thank you!" said {hero}, and gave {friend} a hug.',
            "{hero} was so happy that {they} danced around {friend}.",
            '{hero} laughed. "You are the best friend I have," {they} said.',
        ),
    ),
    "a storm": (
        (
            "{time}, {hero} went for a walk in the forest.",
            "{time}, {hero} went out to pick berries.",
            "{time}, {hero} went up the hill alone.",
        ),
        (
            "Soon the sky turned dark and the {weather} came.",
            "Then a big storm came, with a lot of {weather}.",
            "All at once there was {weather}, and it grew cold.",
        ),
        (
            "{hero} did not know the way home and was {feeling}.",
            "{hero} could not see the path any more.",
            '"I want to go home," said {hero}.',
        ),
        (
            "But {friend} knew a dry cave near the river.",
            '"Follow me!" said {friend}. "I know a safe place."',
            "Then {they} saw a light. It was the house of {friend}.",
        ),
        (
            "They sat close together, ate some {food} and told each other stories.",
            "Inside it was warm, and they had {food} to eat.",
            "They lit a small fire and waited until the storm was over.",
        ),
        (
            "When the sun came back, they walked home hand in hand.",
            "In the morning the sky was blue, and they went home together.",
            "After the storm, they saw a rainbow over the trees.",
        ),
    ),
    "sharing": (
        (
            "{time}, {hero} made a big pot of {food}.",
            "{time}, {their} mother gave {hero} a basket full of {food}.",
            "{time}, {hero} found a lot of {food} and carried it home.",
        ),
        (
            '"This is all mine," {they} thought.',
            "{They} wanted to eat all of it alone.",
            "{They} sat down under a tree and began to eat.",
        ),
        (
            "Then {friend} came by and looked hungry.",
            "Just then, {friend} walked past. {friend} had nothing to eat.",
            '"I am so hungry," said {friend}.',
        ),
        (
            "{hero} thought about it for a while.",
            "{hero} looked at the {food} and then at {friend}.",
            "At first, {hero} did not want to share.",
        ),
        (
            '"Come and sit with me," said {hero}. "There is enough for two."',
            "Then {they} gave half of it to {friend}.",
            'Then {they} smiled and said, "Let us eat together."',
        ),
        (
            "The {food} tasted much better with a friend.",
            "They ate and laughed until the stars came out.",
            "From that day on, {hero} shared everything with {friend}.",
        ),
    ),
    "a {seed} seed": (
        (
            "{time}, {hero} found a tiny {seed} seed on the path.",
            "{time}, an old woman gave {hero} a {seed} seed.",
            "{time}, {friend} gave {hero} a {seed} seed.",
        ),
        (
            "{They} put it in the ground behind the house.",
            "{They} planted it in the garden and gave it some water.",
            "{They} dug a small hole, put the seed in it and covered it with earth.",
        ),
        (
            "{They} waited for many days, but nothing happened.",
            "Every day {they} looked, but there was nothing to see.",
            '"It will never grow," said {friend}.',
        ),
        (
            "But {hero} did not give up and gave it water every morning.",
            "{hero} was patient and sang a song to it every evening.",
            '"We must wait a little longer," said {hero}.',
        ),
        (
            "Then, in spring, a small green leaf came out of the ground.",
            "And then, after a night of rain, there was a green leaf.",
            "At last a tiny plant looked out of the earth.",
        ),
        (
            "It grew and grew until it was taller than the house.",
            "By the summer, everybody came to look at it.",
            "{hero} was very proud, and {friend} was happy too.",
        ),
    ),
    "a race": (
        (
            "{time}, {hero} and {friend} wanted to know who was faster.",
            '{time}, {friend} said, "I can run faster than you."',
            "{time}, there was a big race, and {hero} wanted to win it.",
        ),
        (
            "They ran from the bridge to the old tree.",
            "They started at the river and ran over the hill.",
            "Everybody came to watch them run.",
        ),
        (
            "{friend} was very fast and was soon far ahead.",
            "At first, {friend} was in front.",
            "{hero} ran as fast as {they} could.",
        ),
        (
            "But then {friend} fell over a stone and hurt a foot.",
            "Then {friend} fell into the mud.",
            "But {friend} slipped on the wet grass and could not get up.",
        ),
        (
            "{hero} could have won, but {they} stopped to help.",
            "{hero} stopped at once and ran back to help.",
            '"Are you all right?" asked {hero}, and stopped.',
        ),
        (
            "They crossed the line together, and both of them won.",
            "They walked the rest of the way side by side.",
            '"You are a true friend," said {friend}. That was better than winning.',
        ),
    ),
    "the dark": (
        (
            "{hero} was not afraid of anything, except the dark.",
            "Every night, {hero} was afraid of the dark.",
            "When the lights went out, {hero} could not sleep.",
        ),
        (
            "{time}, {they} told {friend} about it.",
            "{time}, {they} heard a strange noise outside.",
            "{time}, {hero} had to walk home after the sun went down.",
        ),
        (
            '"Let me show you something," said {friend}.',
            '"Come with me," said {friend}, and took {them} outside.',
            '{friend} smiled and said, "Look up!"',
        ),
        (
            "The sky was full of bright stars.",
            "There were more stars than anyone could count.",
            "A big round moon stood over the trees.",
        ),
        (
            '"I never saw them before," said {hero}.',
            '"They are only there when it is dark," said {friend}.',
            '"How beautiful!" said {hero}.',
        ),
        (
            "After that night, {hero} was not afraid any more.",
            "Since then, {hero} looks at the stars before {they} goes to sleep.",
            "That night {they} slept very well.",
        ),
    ),
    "a new friend": (
        (
            "{hero} had nobody to play with.",
            "{hero} often felt lonely.",
            "{hero} was new there and did not know anyone.",
        ),
        (
            "{time}, {they} met a {friend_trait} {friend_kind} named {friend}.",
            "{time}, a {friend_kind} named {friend} came down the road.",
            "{time}, {they} saw a {friend_kind} sitting {hiding}. It was {friend}.",
        ),
        (
            '"Hello," said {hero}. "Do you want to play?"',
            '{hero} was shy, but {they} said, "Good morning!"',
            '"What are you doing?" asked {hero}.',
        ),
        (
            '"Yes, please!" said {friend}.',
            '{friend} smiled and said, "I was looking for a friend."',
            '"I want to fly a kite, but I need some help," said {friend}.',
        ),
        (
            "They played with a {color} {thing} all day long.",
            "They built a small house out of stones and leaves.",
            "They swam in the lake and ate {food}.",
        ),
        (
            "When the sun went down, they were the best of friends.",
            "From then on, they met every day.",
            "{hero} was never lonely again.",
        ),
    ),
    "a broken {thing}": (
        (
            "{time}, {hero} found an old {thing}. It was broken.",
            "{time}, {hero} dropped the {color} {thing} of {friend}, and it broke.",
            "{time}, the {color} {thing} fell down and broke.",
        ),
        (
            "{They} was very sorry and did not know what to do.",
            '"Oh no!" said {hero}.',
            "At first, {they} wanted to hide it.",
        ),
        (
            "But {they} went to {friend} and told the truth.",
            "Then {they} showed it to {friend}.",
            "{They} thought about it and then went to see {friend}.",
        ),
        (
            '"Do not be sad," said {friend}. "We can fix it."',
            '"Thank you for telling me," said {friend}.',
            "{friend} looked at it for a long time.",
        ),
        (
            "They worked together all afternoon, with glue and string.",
            "They took some wood and some paint and began to work.",
            "It took many hours, but they did not give up.",
        ),
        (
            "In the end, the {thing} looked even better than before.",
            "In the evening, the {thing} was as good as new.",
            "Now it was their {thing}, and they loved it.",
        ),
    ),
    "a treasure": (
        (
            "{time}, {hero} found an old map in a bottle.",
            "{time}, {friend} came with an old map.",
            "{time}, there was a map between the pages of a book.",
        ),
        (
            "It showed the way to a treasure.",
            "On it was a red cross, not far from there.",
            '"A treasure!" said {hero}. "Let us find it."',
        ),
        (
            "{hero} and {friend} walked over the hills and through the forest.",
            "They crossed a river and climbed over big stones.",
            "They walked all day and got very tired.",
        ),
        (
            "At last they came to an old tree and began to dig.",
            "They found the place {hiding}.",
            "There, in the ground, was a wooden box.",
        ),
        (
            "In it was a {color} {thing} and a letter.",
            "There was no gold in it, only a {color} {thing}.",
            "They opened it and found a {color} {thing}.",
        ),
        (
            'The letter said: "The best treasure is a good friend."',
            '"It does not matter," said {hero}. "This was the best day of my life."',
            "They laughed and took it home, and they kept it for many years.",
        ),
    ),
    "helping": (
        (
            "{time}, {hero} heard somebody cry for help.",
            "{time}, {hero} saw that {friend} was in the river.",
            "{time}, {friend} was stuck in a deep hole.",
        ),
        (
            '"Help!" cried {friend}. "I cannot get out!"',
            "{friend} was too tired to get out alone.",
            "{friend} was {feeling} and called for help.",
        ),
        (
            "{hero} was small, but {they} had an idea.",
            "{hero} was afraid, but {they} ran to help.",
            "{hero} did not wait.",
        ),
        (
            "{They} took a long rope and threw it to {friend}.",
            "{They} pushed a long branch down to {friend}.",
            "{They} held out a hand and pulled with all {their} might.",
        ),
        (
            "Slowly, step by step, {friend} came out.",
            "It was hard, but in the end {friend} was safe.",
            "One, two, three, and {friend} was out!",
        ),
        (
            '"You saved me!" said {friend}.',
            "Everybody in the village heard about it and was proud of {hero}.",
            "{friend} never forgot what {hero} had done.",
        ),
    ),
    "a song": (
        (
            "{hero} loved to sing, but only when nobody was there.",
            "{hero} could play the flute, but {they} was too shy to show it.",
            "{hero} knew a song that nobody else knew.",
        ),
        (
            "{time}, {friend} was ill and had to stay in bed.",
            "{time}, {friend} was very sad.",
            "{time}, there was a party, but there was no music.",
        ),
        (
            '"What can I do?" thought {hero}.',
            "{hero} wanted to help, but {they} was nervous.",
            "Nobody knew what to do.",
        ),
        (
            "Then {they} took a deep breath and began to sing.",
            "At last {they} stood up and sang {their} song.",
            "Then {they} closed {their} eyes and began.",
        ),
        (
            "It was so beautiful that everybody was quiet.",
            "The birds stopped to listen.",
            "{friend} smiled for the first time that day.",
        ),
        (
            '"Please sing it again!" said {friend}.',
            "From that day on, {hero} sang every evening.",
            "And {hero} was not shy any more.",
        ),
    ),
    "the moon": (
        (
            "{hero} wanted to touch the moon.",
            "Every night {hero} looked at the moon.",
            '"I want to visit the moon," said {hero}.',
        ),
        (
            "{time}, {they} climbed the highest tree, but the moon was still far away.",
            "{time}, {they} built a ladder, but it was too short.",
            "{time}, {they} climbed up the mountain, but the moon was still too high.",
        ),
        (
            "{hero} came down again and felt {feeling}.",
            '"I will never get there," {they} said.',
            "{They} sat down by the water and was {feeling}.",
        ),
        (
            '"Look into the lake," said {friend}.',
            "Then {friend} came with a bowl of water.",
            '{friend} thought about it and said, "I have an idea."',
        ),
        (
            "There was the moon, round and white, in the water.",
            "In the water they could see the moon.",
            "And there it was, right in front of {them}.",
        ),
        (
            "{hero} put a finger into it and laughed.",
            "{hero} touched it very gently. It was cold and wet.",
            '"Now I have touched the moon," said {hero}, and went home happy.',
        ),
    ),
}
ENDINGS = (
    "And they lived happily ever after.", "The end.", "They were friends for the rest of their lives.",
    "What a wonderful day it was.", "And that night, everybody slept well.", "It was a day to remember.",
)  # fmt: skip

REQUESTS = (
    "Tell me a story.", "Tell me a story.", "Tell me a short story.", "Tell a story.", "Write a story.",
    "Write a short story.", "Can you tell me a story?", "I want to hear a story.", "Do you know a story?",
    "Please tell me a story.", "Could you tell me a short story?", "Make up a story.", "Tell me a bedtime story.",
    "Story, please.", "Write me a little story.", "Give me a story.",
)  # fmt: skip
NEXT_REQUESTS = (
    "Another one.",
    "Another one, please.",
    "Tell me another one.",
    "Tell me another story.",
    "One more, please.",
)
ABOUT = (
    "Tell me a story about {x}.", "Tell me a story about {x}.", "Tell me a short story about {x}.",
    "Write a story about {x}.", "Write a short story about {x}.", "Can you tell me a story about {x}?",
    "I want a story about {x}.", "Make up a story about {x}.", "A story about {x}, please.",
)  # fmt: skip
