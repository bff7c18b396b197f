"""Write the small instruction set that ships with sft-ladder.

Purpose
    A Chinese and English instruction set, made for this project, that a model of under a million
    parameters can learn on two CPU cores, so that the whole pipeline can be run and its result checked.

Contract
    * Standard library only. The same seed writes the same bytes, on every machine.
    * One JSON object a line, UTF-8, keys ``instruction``, ``input`` and ``output``; ``input`` may be "".
    * Every task is closed: its answer is short, unique, and right or wrong by exact match.
    * Within a task every clean row asks about its own combination of arguments, whatever the wording, so
      a random held-out part asks only for combinations that the task's training part doesn't contain. A
      combination that can be asked in two directions, such as a translation, is asked in one of them. A
      task that exists in both languages draws for each on its own, so the two may share a combination.
    * Small sums, times in minutes and counts of one item are there as harder tasks: a model of this size,
      with so few rows, gets most of them wrong.
    * Some 3 % of the lines are dirty on purpose, for the cleaning stage to find. ``DIRT`` gives the number
      of each kind: lines cut off in the middle, rows whose output is empty or absent, exact copies of
      other lines, and rows far too long for a packed sequence.

Command
    python examples/sample/generate.py data/raw/sample.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

SEED = 20240305
DIRT = {"broken": 24, "empty": 24, "duplicate": 24, "overlong": 18}

NUMBERS = {
    2: ("two", "两"),
    3: ("three", "三"),
    4: ("four", "四"),
    5: ("five", "五"),
    6: ("six", "六"),
    7: ("seven", "七"),
    8: ("eight", "八"),
    9: ("nine", "九"),
}
COLOURS = {
    "red": "红色",
    "blue": "蓝色",
    "green": "绿色",
    "white": "白色",
    "black": "黑色",
    "yellow": "黄色",
    "grey": "灰色",
    "brown": "棕色",
}
ANIMALS = {
    "cat": "猫",
    "dog": "狗",
    "bird": "鸟",
    "duck": "鸭子",
    "tiger": "老虎",
    "rabbit": "兔子",
    "monkey": "猴子",
    "panda": "熊猫",
    "lion": "狮子",
    "bear": "熊",
}
PLACES = {"garden": "花园", "school": "学校", "park": "公园", "kitchen": "厨房", "forest": "森林", "shop": "商店"}
PEOPLE = {"Tom": "汤姆", "Anna": "安娜", "Lucy": "露西", "David": "大卫", "Mary": "玛丽", "Jack": "杰克"}
FOODS = {
    "tea": "茶",
    "coffee": "咖啡",
    "rice": "米饭",
    "bread": "面包",
    "milk": "牛奶",
    "fish": "鱼",
    "soup": "汤",
    "fruit": "水果",
}
VERBS = {"like": ("likes", "喜欢"), "want": ("wants", "想要"), "buy": ("buys", "买"), "sell": ("sells", "卖")}
ITEMS = {"apple": "苹果", "banana": "香蕉", "grape": "葡萄", "lemon": "柠檬", "mango": "芒果", "pear": "梨"}
OPPOSITES = [
    ("big", "small"),
    ("hot", "cold"),
    ("old", "new"),
    ("fast", "slow"),
    ("high", "low"),
    ("long", "short"),
    ("rich", "poor"),
    ("wet", "dry"),
]
OPPOSITES_ZH = [("大", "小"), ("热", "冷"), ("新", "旧"), ("快", "慢"), ("高", "低"), ("长", "短"), ("多", "少"), ("远", "近")]
PLURALS = {
    "cat": "cats",
    "box": "boxes",
    "city": "cities",
    "leaf": "leaves",
    "child": "children",
    "man": "men",
    "mouse": "mice",
    "foot": "feet",
    "bus": "buses",
    "dog": "dogs",
    "baby": "babies",
}
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
CITIES = {"Paris": "巴黎", "London": "伦敦", "Rome": "罗马", "Beijing": "北京", "Tokyo": "东京", "Cairo": "开罗"}
JOBS = {"doctor": "医生", "teacher": "老师", "driver": "司机", "cook": "厨师", "nurse": "护士", "writer": "作家"}
DIGITS_ZH = "零一二三四五六七八九"


@dataclass(frozen=True)
class Row:
    """One row, with the combination of arguments that no other clean row may repeat."""

    key: Hashable
    instruction: str
    input: str
    output: str

    def line(self) -> str:
        return dump({"instruction": self.instruction, "input": self.input, "output": self.output})


def dump(fields: dict[str, str]) -> str:
    return json.dumps(fields, ensure_ascii=False)


def wording(rng: random.Random, phrasings: list[str], **slots: object) -> str:
    return rng.choice(phrasings).format(**slots)


def translation(rng: random.Random, key: Hashable, english: str, chinese: str) -> Row:
    """Ask for one direction of a pair, at random."""
    if rng.random() < 0.5:
        return Row(key, rng.choice(["翻译成中文：", "Translate into Chinese:", "用中文怎么说："]), english, chinese)
    return Row(key, rng.choice(["翻译成英文：", "Translate into English:", "用英语怎么说："]), chinese, english)


def translate_group(rng: random.Random) -> Row:
    number, colour, animal = rng.choice(list(NUMBERS)), rng.choice(list(COLOURS)), rng.choice(list(ANIMALS))
    english, chinese = NUMBERS[number]
    return translation(
        rng, (number, colour, animal), f"{english} {colour} {animal}s", f"{chinese}只{COLOURS[colour]}的{ANIMALS[animal]}"
    )


def translate_place(rng: random.Random) -> Row:
    colour, animal, place = rng.choice(list(COLOURS)), rng.choice(list(ANIMALS)), rng.choice(list(PLACES))
    return translation(
        rng,
        (colour, animal, place),
        f"The {colour} {animal} is in the {place}.",
        f"{COLOURS[colour]}的{ANIMALS[animal]}在{PLACES[place]}里。",
    )


def sentence(rng: random.Random) -> tuple[str, str, str]:
    return rng.choice(list(PEOPLE)), rng.choice(list(VERBS)), rng.choice(list(FOODS))


def translate_sentence(rng: random.Random) -> Row:
    person, verb, food = sentence(rng)
    third, chinese = VERBS[verb]
    return translation(rng, (person, verb, food), f"{person} {third} {food}.", f"{PEOPLE[person]}{chinese}{FOODS[food]}。")


def negate_en(rng: random.Random) -> Row:
    person, verb, food = sentence(rng)
    ask = wording(rng, ["Make this negative:", "Rewrite in the negative:"])
    return Row((person, verb, food), ask, f"{person} {VERBS[verb][0]} {food}.", f"{person} does not {verb} {food}.")


def negate_zh(rng: random.Random) -> Row:
    person, verb, food = sentence(rng)
    subject, action, thing = PEOPLE[person], VERBS[verb][1], FOODS[food]
    return Row(
        (person, verb, food),
        wording(rng, ["改成否定句：", "变为否定句："]),
        f"{subject}{action}{thing}。",
        f"{subject}不{action}{thing}。",
    )


def item_names(chinese: bool) -> list[str]:
    return list(ITEMS.values()) if chinese else list(ITEMS)


def words(rng: random.Random, chinese: bool, count: int) -> list[str]:
    return rng.sample(item_names(chinese), count)


def end_of_list(rng: random.Random, chinese: bool) -> Row:
    items, last = words(rng, chinese, 4), rng.random() < 0.5
    if chinese:
        ask = wording(rng, ["{end}是什么？", "写出{end}："], end="最后一个" if last else "第一个")
    else:
        ask = wording(rng, ["Give the {end} item:", "Which item is {end}?"], end="last" if last else "first")
    return Row((tuple(items), last), ask, ("、" if chinese else ", ").join(items), items[-1 if last else 0])


def reverse_list(rng: random.Random, chinese: bool) -> Row:
    items = words(rng, chinese, 3)
    joiner = "、" if chinese else ", "
    ask = wording(rng, ["倒过来写：", "颠倒顺序："] if chinese else ["Reverse the list:", "Write it backwards:"])
    return Row(tuple(items), ask, joiner.join(items), joiner.join(reversed(items)))


def count_item(rng: random.Random, chinese: bool) -> Row:
    one, other = words(rng, chinese, 2)
    items = [rng.choice([one, other]) for _ in range(3)]
    if chinese:
        ask = wording(rng, ["“{one}”出现几次？", "有几个“{one}”？"], one=one)
    else:
        ask = wording(rng, ["How often does {one} appear?", "Count {one} in the list:"], one=one)
    return Row((one, tuple(items)), ask, ("、" if chinese else ", ").join(items), str(items.count(one)))


def list_length(rng: random.Random, chinese: bool) -> Row:
    items = tuple(rng.choice(item_names(chinese)) for _ in range(rng.randint(2, 6)))
    phrasings = ["一共有几个？", "有多少个？"] if chinese else ["How many items?", "Count the items:"]
    return Row(items, rng.choice(phrasings), ("、" if chinese else ", ").join(items), str(len(items)))


def sort_words(rng: random.Random) -> Row:
    items = words(rng, False, 3)
    ask = wording(rng, ["Sort alphabetically:", "Put in alphabetical order:"])
    return Row(tuple(items), ask, ", ".join(items), ", ".join(sorted(items)))


def sort_numbers(rng: random.Random, chinese: bool) -> Row:
    items = rng.sample(range(1, 9), 3)
    down = rng.random() < 0.5
    if chinese:
        ask = wording(rng, ["{order}排序：", "{order}排列："], order="从大到小" if down else "从小到大")
    else:
        ask = wording(rng, ["Sort, {order} first:", "List the {order} number first:"], order="largest" if down else "smallest")
    ordered = sorted(items, reverse=down)
    return Row((tuple(items), down), ask, ", ".join(map(str, items)), ", ".join(map(str, ordered)))


def extreme_number(rng: random.Random, chinese: bool) -> Row:
    items, largest = rng.sample(range(1, 10), 3), rng.random() < 0.5
    if chinese:
        ask = wording(rng, ["哪个{end}？", "找出{end}的数："], end="最大" if largest else "最小")
    else:
        ask = wording(rng, ["Which is the {end}?", "Pick the {end} number:"], end="largest" if largest else "smallest")
    answer = max(items) if largest else min(items)
    return Row((tuple(items), largest), ask, ", ".join(map(str, items)), str(answer))


def convert_unit(rng: random.Random, chinese: bool) -> Row:
    value = rng.randint(2, 60)
    english, small_en, big_zh, small_zh, factor = rng.choice(
        [
            ("metres", "centimetres", "米", "厘米", 100),
            ("kilometres", "metres", "公里", "米", 1000),
            ("kilograms", "grams", "公斤", "克", 1000),
            ("centimetres", "millimetres", "厘米", "毫米", 10),
        ]
    )
    if chinese:
        ask = wording(rng, ["{n}{big}是多少{small}？", "把{n}{big}换算成{small}："], n=value, big=big_zh, small=small_zh)
        return Row((value, english), ask, "", f"{value * factor}{small_zh}")
    ask = wording(rng, ["How many {small} are {n} {big}?", "Convert {n} {big} to {small}:"], n=value, big=english, small=small_en)
    return Row((value, english), ask, "", f"{value * factor} {small_en}")


def convert_time(rng: random.Random, chinese: bool) -> Row:
    hours, extra = rng.randint(1, 5), rng.choice([0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50])
    total = hours * 60 + extra
    if chinese:
        span = f"{hours}小时" + (f"{extra}分钟" if extra else "")
        return Row((hours, extra), wording(rng, ["{s}是多少分钟？", "{s}一共几分钟？"], s=span), "", f"{total}分钟")
    span = f"{hours} h" + (f" {extra} min" if extra else "")
    return Row(
        (hours, extra), wording(rng, ["How many minutes are {s}?", "Give {s} in minutes:"], s=span), "", f"{total} minutes"
    )


def date(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(2021, 2026), rng.randint(1, 12), rng.randint(1, 28)


def date_en(rng: random.Random) -> Row:
    year, month, day = date(rng)
    figures, spoken = f"{day:02d}/{month:02d}/{year}", f"{day} {MONTHS[month - 1]} {year}"
    if rng.random() < 0.5:
        return Row((year, month, day), wording(rng, ["Write out the date:", "Spell out the date:"]), figures, spoken)
    return Row((year, month, day), wording(rng, ["Write as DD/MM/YYYY:", "Give the date in figures:"]), spoken, figures)


def date_zh(rng: random.Random) -> Row:
    year, month, day = date(rng)
    iso, spoken = f"{year}-{month:02d}-{day:02d}", f"{year}年{month}月{day}日"
    if rng.random() < 0.5:
        return Row((year, month, day), wording(rng, ["写成中文日期：", "改为年月日："]), iso, spoken)
    return Row((year, month, day), wording(rng, ["写成数字日期：", "改为YYYY-MM-DD："]), spoken, iso)


def extract_field(rng: random.Random, chinese: bool) -> Row:
    person, city, job = rng.choice(list(PEOPLE)), rng.choice(list(CITIES)), rng.choice(list(JOBS))
    field = rng.randrange(3)
    if chinese:
        values = [PEOPLE[person], CITIES[city], JOBS[job]]
        ask = wording(rng, ["{f}是什么？", "找出{f}："], f=["姓名", "城市", "职业"][field])
    else:
        values = [person, city, job]
        ask = wording(rng, ["What is the {f}?", "Extract the {f}:"], f=["name", "city", "job"][field])
    return Row((person, city, job, field), ask, ("、" if chinese else ", ").join(values), values[field])


def add(rng: random.Random, chinese: bool) -> Row:
    left, right = rng.randint(1, 20), rng.randint(1, 9)
    phrasings = ["{a}加{b}等于几？", "计算{a}加{b}："] if chinese else ["What is {a} plus {b}?", "Add {a} and {b}:"]
    return Row((left, right), wording(rng, phrasings, a=left, b=right), "", str(left + right))


def opposites(rng: random.Random, chinese: bool) -> Row:
    first, second = rng.sample(OPPOSITES_ZH if chinese else OPPOSITES, 2)
    flip_first, flip_second = rng.randrange(2), rng.randrange(2)
    asked, answer = (first[flip_first], second[flip_second]), (first[1 - flip_first], second[1 - flip_second])
    phrasings = ["写出反义词：", "反义词是什么？"] if chinese else ["Give the opposites:", "Write the opposite words:"]
    joiner = "、" if chinese else ", "
    return Row(asked, rng.choice(phrasings), joiner.join(asked), joiner.join(answer))


def plurals(rng: random.Random) -> Row:
    items = tuple(rng.sample(list(PLURALS), 2))
    ask = wording(rng, ["Write the plurals:", "Make these plural:"])
    return Row(items, ask, ", ".join(items), ", ".join(PLURALS[item] for item in items))


def capitals(rng: random.Random) -> Row:
    phrase = f"{rng.choice(list(COLOURS))} {rng.choice(list(ANIMALS))}"
    return Row(phrase, wording(rng, ["Write in capitals:", "Change to upper case:"]), phrase, phrase.upper())


def numeral_zh(rng: random.Random) -> Row:
    """A number below 1,000, with a tens digit of two or more and no nought, between figures and characters."""
    hundreds, tens, ones = rng.randint(0, 9), rng.randint(2, 9), rng.randint(1, 9)
    figures = f"{hundreds or ''}{tens}{ones}"
    spoken = (DIGITS_ZH[hundreds] + "百" if hundreds else "") + DIGITS_ZH[tens] + "十" + DIGITS_ZH[ones]
    if rng.random() < 0.5:
        return Row(figures, wording(rng, ["写成汉字：", "用汉字写数："]), figures, spoken)
    return Row(figures, wording(rng, ["写成数字：", "用数字写出："]), spoken, figures)


Maker = Callable[[random.Random], Row]


def in_language(maker: Callable[[random.Random, bool], Row], chinese: bool) -> Maker:
    return lambda rng: maker(rng, chinese)


TASKS: dict[str, tuple[Maker, int]] = {
    "translate_group": (translate_group, 250),
    "translate_place": (translate_place, 190),
    "translate_sentence": (translate_sentence, 110),
    "negate_en": (negate_en, 80),
    "negate_zh": (negate_zh, 80),
    "end_of_list_en": (in_language(end_of_list, False), 100),
    "end_of_list_zh": (in_language(end_of_list, True), 100),
    "reverse_list_en": (in_language(reverse_list, False), 80),
    "reverse_list_zh": (in_language(reverse_list, True), 80),
    "count_item_en": (in_language(count_item, False), 30),
    "count_item_zh": (in_language(count_item, True), 30),
    "list_length_en": (in_language(list_length, False), 60),
    "list_length_zh": (in_language(list_length, True), 60),
    "sort_words": (sort_words, 90),
    "sort_numbers_en": (in_language(sort_numbers, False), 110),
    "sort_numbers_zh": (in_language(sort_numbers, True), 110),
    "extreme_number_en": (in_language(extreme_number, False), 90),
    "extreme_number_zh": (in_language(extreme_number, True), 90),
    "convert_unit_en": (in_language(convert_unit, False), 80),
    "convert_unit_zh": (in_language(convert_unit, True), 80),
    "convert_time_en": (in_language(convert_time, False), 20),
    "convert_time_zh": (in_language(convert_time, True), 20),
    "date_en": (date_en, 120),
    "date_zh": (date_zh, 120),
    "extract_field_en": (in_language(extract_field, False), 110),
    "extract_field_zh": (in_language(extract_field, True), 110),
    "add_en": (in_language(add, False), 35),
    "add_zh": (in_language(add, True), 35),
    "opposites_en": (in_language(opposites, False), 90),
    "opposites_zh": (in_language(opposites, True), 90),
    "plurals": (plurals, 80),
    "capitals": (capitals, 50),
    "numeral_zh": (numeral_zh, 130),
}


def make_rows(rng: random.Random, maker: Maker, count: int, seen: set[Hashable]) -> list[Row]:
    """Draw ``count`` rows whose combinations are not in ``seen``, and add them to it."""
    rows: list[Row] = []
    for _ in range(count * 200):
        if len(rows) == count:
            return rows
        row = maker(rng)
        if row.key not in seen:
            seen.add(row.key)
            rows.append(row)
    raise ValueError(f"fewer than {count} distinct combinations")


def clean_rows(rng: random.Random, tasks: dict[str, tuple[Maker, int]] = TASKS) -> dict[str, list[Row]]:
    return {name: make_rows(rng, maker, count, set()) for name, (maker, count) in tasks.items()}


def broken_line(rng: random.Random, row: Row) -> str:
    """A line cut off inside its object, so that it never parses."""
    line = row.line()
    return line[: rng.randint(len(line) // 3, len(line) - 2)]


def empty_line(index: int, row: Row) -> str:
    """A row without an answer: an empty output, one of white space only, or none at all."""
    fields = {"instruction": row.instruction, "input": row.input}
    return dump(fields if index % 3 == 2 else {**fields, "output": ["", "  "][index % 3]})


def overlong_line(rng: random.Random, chinese: bool) -> str:
    """A sound question about a list of several hundred items: at least two tokens an item."""
    items = [rng.choice(item_names(chinese)) for _ in range(rng.randint(450, 700))]
    ask = "最后一个是什么？" if chinese else "Which item is last?"
    return Row(None, ask, ("、" if chinese else ", ").join(items), items[-1]).line()


def lines(seed: int = SEED) -> list[str]:
    """Every line of the file, clean and dirty, in the order that the seed gives."""
    rng = random.Random(seed)
    clean = [row for rows in clean_rows(rng).values() for row in rows]
    result = [row.line() for row in clean]
    copies = rng.sample(result, DIRT["duplicate"])
    spoiled = rng.sample(clean, DIRT["broken"] + DIRT["empty"])
    result += copies
    result += [broken_line(rng, row) for row in spoiled[: DIRT["broken"]]]
    result += [empty_line(index, row) for index, row in enumerate(spoiled[DIRT["broken"] :])]
    result += [overlong_line(rng, chinese=index % 2 == 0) for index in range(DIRT["overlong"])]
    rng.shuffle(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the sample instruction set.")
    parser.add_argument("path", type=Path, help="where to write the JSON lines")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    with arguments.path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines(arguments.seed))


if __name__ == "__main__":
    main()
