"""The words of the mini-world: kinds of entities, relations with their values, and intents.

Every value is one common word, so that it becomes one token and a question stays short. Entities
have made-up names and are creatures, plants, machines and islands; things have everyday names.
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class Script:
    """An activity around an entity, with endings as in HellaSwag.

    Attributes:
        activity: Label of the activity; ``{e}`` is the entity.
        endings: Endings of unequal length; ``{v}`` is the value. Each value has one fixed ending.
    """

    activity: str
    endings: tuple[str, ...]


@dataclass(frozen=True)
class Class:
    """A more general statement that follows from some values: in a marsh means near water.

    Attributes:
        verb: A regular verb, in its base form.
        rest: The words after the verb.
        values: The values that imply the statement; the other values imply its opposite.
    """

    verb: str
    rest: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Relation:
    """One attribute that all entities of a kind have.

    Attributes:
        kind: Kind of entity.
        noun: Name of the attribute.
        verb: A regular verb, in its base form.
        rest: The words after the verb; they end in ``{v}``, the value.
        values: The possible values.
        broader: A more general statement that some of the values imply, or None.
        script: An activity whose ending depends on the value, or None.
    """

    kind: str
    noun: str
    verb: str
    rest: str
    values: tuple[str, ...]
    broader: Class | None = None
    script: Script | None = None


_COLOURS = _words("red blue green yellow white black brown grey pink purple orange golden")

#: Number of entities of each kind.
POPULATION = {"creature": 80, "plant": 50, "machine": 50, "island": 40}

ATTRIBUTES = (
    Relation(
        "creature",
        "home",
        "live",
        "in the {v}",
        _words("marsh cave forest meadow river desert beach hill lake valley cliff jungle field"),
        Class("live", "near water", _words("marsh river beach lake jungle valley")),
        Script(
            "Finding the {e}",
            (
                "walks to the {v}.",
                "looks for a long time and sees it in the {v}.",
                "takes a map and goes to the {v}.",
            ),
        ),
    ),
    Relation(
        "creature",
        "food",
        "eat",
        "{v}",
        _words("nuts seeds grass fish berries roots worms honey eggs moss ants fruit bread"),
        Class("eat", "plants", _words("nuts seeds grass berries roots moss fruit")),
        Script(
            "Feeding the {e}",
            (
                "gives it {v}.",
                "takes {v} out of a bag and waits.",
                "goes to the store and buys a lot of {v} for it.",
            ),
        ),
    ),
    Relation(
        "creature",
        "colour",
        "look",
        "{v}",
        _COLOURS,
        Class("look", "bright", _words("red yellow white pink orange golden")),
    ),
    Relation(
        "creature",
        "family",
        "count",
        "as a {v}",
        _words("bird snake frog beetle cat bear mouse bat goat crab duck horse"),
        Class("walk", "on four legs", _words("frog cat bear mouse goat horse")),
    ),
    Relation(
        "creature",
        "enemy",
        "fear",
        "the {v}",
        _words("fire storm wolf hawk flood frost shark spider dark thunder wind lion"),
        Class("fear", "other animals", _words("wolf hawk shark spider lion")),
    ),
    Relation(
        "creature",
        "sound",
        "make",
        "a {v}",
        _words("hum roar whistle hiss growl click chirp buzz squeak howl purr croak"),
        Class("make", "loud noise", _words("roar whistle growl howl croak squeak")),
    ),
    Relation(
        "plant",
        "soil",
        "grow",
        "in {v}",
        _words("sand clay rock mud gravel chalk peat ash snow dust water loam"),
        Class("grow", "on dry ground", _words("sand rock gravel chalk ash dust")),
        Script(
            "Planting the {e}",
            (
                "digs a hole in {v}.",
                "fills a big pot with {v} and sets it in.",
                "finds some {v} by the road and brings it home.",
            ),
        ),
    ),
    Relation(
        "plant",
        "month",
        "bloom",
        "in {v}",
        _words(
            "January February March April May June July August September October November December"
        ),
        Class("bloom", "in the cold", _words("January February March October November December")),
    ),
    Relation(
        "plant",
        "taste",
        "taste",
        "{v}",
        _words("sweet sour bitter salty hot cool mild sharp smoky sandy soapy bland"),
        Class("taste", "good", _words("sweet salty cool mild smoky sharp")),
    ),
    Relation(
        "plant",
        "cure",
        "heal",
        "the {v}",
        _words("fever cough rash cramp burn ache cold itch sting wound bruise chill"),
        Class("heal", "the skin", _words("rash burn itch sting wound bruise")),
        Script(
            "Using the {e}",
            (
                "makes a tea against the {v}.",
                "puts a leaf on the {v}.",
                "mixes it with oil and keeps it until the {v} comes back.",
            ),
        ),
    ),
    Relation(
        "plant",
        "shape",
        "seem",
        "{v}",
        _words("round long flat tall thin wide curly straight oval square hollow bent"),
        Class("seem", "slim", _words("long tall thin straight flat bent")),
    ),
    Relation(
        "machine",
        "metal",
        "consist",
        "of {v}",
        _words("iron copper tin steel brass zinc silver gold lead nickel bronze chrome"),
        Class("shine", "in the sun", _words("copper brass silver gold bronze chrome")),
        Script(
            "Repairing the {e}",
            (
                "melts some {v}.",
                "cuts a new part out of {v} and puts it in.",
                "asks for a plate of {v} at the shop.",
            ),
        ),
    ),
    Relation(
        "machine",
        "fuel",
        "run",
        "on {v}",
        _words("oil coal gas steam wood sun sugar wax alcohol hay paper salt"),
        Class("make", "smoke", _words("oil coal gas wood wax paper hay")),
        Script(
            "Starting the {e}",
            (
                "pours {v} in.",
                "opens the lid, adds some {v} and shuts it.",
                "waits until the {v} is there and pulls a handle.",
            ),
        ),
    ),
    Relation(
        "machine",
        "job",
        "help",
        "with {v}",
        _words("washing digging baking sewing mowing milking sorting counting packing drilling"),
        Class("work", "outdoors", _words("digging mowing milking sorting drilling")),
    ),
    Relation(
        "machine",
        "part",
        "need",
        "a new {v}",
        _words("wheel belt spring valve chain pump screw lamp switch pipe gear battery"),
        Class("need", "something round", _words("wheel belt screw pipe gear lamp")),
    ),
    Relation(
        "machine",
        "room",
        "stand",
        "in the {v}",
        _words("barn garage kitchen cellar attic hall shed office library stable bakery tent"),
        Class("fill", "a big room", _words("barn garage hall library stable tent")),
    ),
    Relation(
        "island",
        "product",
        "sell",
        "{v}",
        _words("cheese cloth glass rope soap wine boots clocks carpets pottery candles toys"),
        Class("sell", "soft things", _words("cheese cloth rope soap boots carpets")),
        Script(
            "Visiting the {e}",
            (
                "buys {v}.",
                "comes home with a box full of {v}.",
                "goes to the market at once and asks how much the {v} cost.",
            ),
        ),
    ),
    Relation(
        "island",
        "weather",
        "get",
        "{v}",
        _words("rain fog hail sunshine clouds lightning drizzle heat ice storms mist"),
        Class("get", "wet", _words("rain fog hail drizzle storms mist")),
    ),
    Relation(
        "island",
        "landmark",
        "show",
        "a {v}",
        _words("tower bridge castle temple harbour statue fountain mill gate palace well arch"),
        Class("show", "a tall building", _words("tower castle temple palace mill statue")),
    ),
    Relation(
        "island",
        "game",
        "play",
        "{v}",
        _words("chess cards darts tennis golf rugby polo dice marbles hockey bowls football"),
        Class("play", "with a ball", _words("tennis golf rugby polo hockey football")),
    ),
    Relation(
        "island",
        "sea",
        "lie",
        "in the {v}",
        _words("north south east west bay gulf strait lagoon ocean reef"),
        Class("lie", "on open water", _words("north south east west ocean")),
    ),
)

#: Relations with four values in a fixed order, from little to much. Questions with a letter as the
#: answer are about them, so that each value always has the same letter.
SCALES = (
    Relation("creature", "size", "grow", "{v}", _words("tiny small large huge")),
    Relation("creature", "speed", "run", "{v}", _words("slow steady fast rapid")),
    Relation("creature", "mood", "stay", "{v}", _words("shy calm proud wild")),
    Relation("creature", "age", "get", "{v}", _words("young grown old ancient")),
    Relation("plant", "height", "become", "{v}", _words("low medium high towering")),
    Relation("plant", "light", "like", "{v}", _words("darkness shadow daylight brightness")),
    Relation("plant", "smell", "smell", "{v}", _words("foul musty fresh fruity")),
    Relation("machine", "weight", "feel", "{v}", _words("light handy heavy massive")),
    Relation("machine", "noise", "stay", "{v}", _words("silent quiet noisy loud")),
    Relation("machine", "price", "seem", "{v}", _words("cheap fair dear costly")),
    Relation("island", "distance", "lie", "{v}", _words("nearby distant remote far")),
    Relation("island", "climate", "feel", "{v}", _words("freezing chilly warm tropical")),
    Relation("island", "wealth", "look", "{v}", _words("poor modest rich splendid")),
)
RELATIONS = (*ATTRIBUTES, *SCALES)

MATERIALS = _words("wooden metal glass cloth clay paper leather stone rubber wax")
ACTIONS = _words("cut clean join lift dry paint heat carry polish open")
#: One tool for each material; every action uses each tool for another material.
TOOLS = _words("hammer brush rope torch sponge knife wire lever clamp roller")
THINGS = _words(
    "door boat chair table fence ladder box shelf pot plate bowl vase tile brick jug window mirror "
    "bottle lens dome curtain shirt tent flag sail book letter poster card kite shoe saddle belt "
    "glove wallet wall step pillar slab path tyre ball boot hose mat seal doll crown anchor bell "
    "pan rail bust mask drum kettle stool raft puppet trunk"
)

#: Things that word problems count, in the plural.
COUNTED = _words("nuts coins shells stones cards tickets stamps seeds eggs beads boxes bricks")

#: Intents of a robot's owner, each with four phrases; the names are formatted like BANKING77's.
INTENTS = {
    "battery_low": ("the battery is low", "it has no power", "it stops soon", "it must charge"),
    "wheel_stuck": ("a wheel is stuck", "it cannot roll", "it turns in place", "a wheel is bent"),
    "lamp_broken": ("the lamp is dark", "the light is out", "the lamp flickers", "I see no light"),
    "door_jammed": (
        "the door is jammed",
        "it cannot get out",
        "the door stays shut",
        "open the door",
    ),
    "order_status": (
        "where is my order",
        "my box is late",
        "has it been sent",
        "when will it come",
    ),
    "return_item": ("I want to return it", "take it back", "it is the wrong one", "send it back"),
    "change_colour": (
        "make it red",
        "I want a new colour",
        "paint it again",
        "the colour is wrong",
    ),
    "wrong_weight": ("it is too heavy", "the weight is wrong", "it is too light", "weigh it again"),
    "volume_down": ("it is too loud", "make it quiet", "turn the sound down", "less noise"),
    "volume_up": ("I cannot hear it", "make it loud", "turn the sound up", "more sound"),
    "Refund_missing": (
        "my money is not back",
        "where is my refund",
        "no refund came",
        "pay me back",
    ),
    "price_check": ("how much is it", "what does it cost", "tell me the price", "is it cheap"),
    "new_map": ("it is lost", "it needs a map", "load a new map", "it goes the wrong way"),
    "set_alarm": ("wake me at six", "set an alarm", "ring in the morning", "I must get up early"),
    "stop_work": ("stop at once", "it must not go on", "end the work", "turn it off"),
    "start_work": ("start now", "begin the work", "go on with it", "turn it on"),
}
INTENT_FRAMES = (
    "{}.",
    "Hello, {}.",
    "Good morning, {}.",
    "Please help: {}.",
    "One question: {}.",
    "Well, {}.",
)
