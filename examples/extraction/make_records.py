"""Write records.jsonl and records_day2.jsonl: short invented notices, the same each time this is run.

Every text was written for this project. Companies and people are made up; the seeds say which notices a day brings.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
NUM_RECORDS = 192
SEEDS = {"records.jsonl": 1, "records_day2.jsonl": 2}

COMPANIES = (
    "Example Freight",
    "Sample Paper Mill",
    "Placeholder Tools",
    "Northside Test Bakery",
    "Demo Garden Supplies",
    "Model Office Furniture",
    "Acme Cooling",
    "Harbour Street Demo Stores",
    "Generic Print Works",
    "Fictional Farm Foods",
    "Specimen Glass",
    "Mock Electric",
)
PEOPLE = ("Mr. Alpha", "Ms. Beta", "Mr. Gamma", "Ms. Delta", "Mr. Kappa", "Ms. Lambda", "Mr. Sigma", "Ms. Omega")
GOODS = (
    "twelve boxes of printer paper",
    "two pallets of floor tiles",
    "forty desk lamps",
    "a steel workbench",
    "six garden benches",
    "three crates of apples",
    "ninety metres of copper cable",
    "eight office chairs",
    "a walk-in refrigerator door",
    "thirty window panes",
)
SITES = (
    "the main warehouse",
    "the east gate",
    "hall 3",
    "the loading dock",
    "the branch on Mill Road",
    "the second floor",
)
REASONS = (
    "a flooded road near the depot",
    "a missing customs form",
    "a broken axle on the delivery van",
    "a strike at the harbour",
    "an error in the address",
    "a shortage of drivers this week",
)
MACHINES = (
    "the goods lift",
    "the cooling unit",
    "the packing line",
    "the fire alarm",
    "the backup generator",
    "the roller door",
)
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")

NOTICES = {
    "delivery": (
        "{sender} writes under reference {ref} that the delivery of {goods} to {site} will be late because of "
        "{reason}. The new date is {date}. The goods are worth {amount} and stay insured until they arrive. "
        "{person} answers questions about the route and will call an hour before the van comes.",
        "Please note that {goods}, ordered from {sender} and expected at {site}, could not leave the depot in "
        "time. The carrier names {reason} as the cause. Delivery is now planned for {date}. The shipment has the "
        "reference {ref} and a value of {amount}. If nobody can be there on that day, tell {person}.",
        "Delay of shipment {ref}: {sender} regrets that {reason} keeps {goods} from reaching {site} as agreed. "
        "The next attempt is on {date}. Nothing has to be signed before. The order value of {amount} does not "
        "change, and {person} in our office follows the shipment.",
    ),
    "invoice": (
        "{sender} has sent the invoice {ref} for {goods}, delivered to {site} last month. The sum of {amount} is "
        "due on {date} and can be paid by bank transfer only. Please give the reference with the payment. "
        "{person} in accounts has compared the items with the delivery note and found them complete.",
        "This is a payment request from {sender}. For {goods} we ask you to transfer {amount} by {date}. The "
        "invoice number is {ref}. The goods were handed over at {site} and {person} signed for them. A reminder "
        "fee is added when the payment comes more than ten days late.",
        "Invoice {ref} arrived this morning. {sender} charges {amount} for {goods}, including transport to "
        "{site}. The payment date is {date}. {person} asks that the cost be booked under supplies, not under "
        "repairs, and that the paper copy go to the archive.",
    ),
    "maintenance": (
        "{sender} will service {machine} at {site} on {date}. The work takes about three hours, during which the "
        "equipment is switched off. The agreed price is {amount}, parts included. The work order is {ref}. "
        "{person} lets the technicians in and should be told about anything unusual beforehand.",
        "Maintenance notice {ref}: on {date} a team from {sender} comes to {site} to check {machine}. Please keep"
        " the area free from eight in the morning. The visit costs {amount}, whether or not a part has to be "
        "replaced. Ask {person} if the date does not suit you.",
        "The yearly inspection of {machine} is due. {sender} has offered to do it on {date} for {amount} and gave"
        " the offer the number {ref}. The team needs access to {site} and a power socket. {person} has accepted "
        "the offer and will be present during the test.",
    ),
    "return": (
        "{person} reports that {goods} from {sender} arrived damaged at {site}. The return has the number {ref} "
        "and will be collected on {date}. The supplier has promised to refund {amount} as soon as the goods are "
        "back. Until then please leave them in their boxes and take no further parts out.",
        "Return {ref} is agreed with {sender}: {goods} do not match the order and go back from {site}. The van "
        "comes on {date}. We expect a credit of {amount} within two weeks. {person} has taken photographs and "
        "keeps the delivery note until the credit is booked.",
    ),
}


def main() -> None:
    for name, seed in SEEDS.items():
        rng = random.Random(seed)
        lines = [json.dumps(record(rng, number)) for number in range(1, NUM_RECORDS + 1)]
        (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def record(rng: random.Random, number: int) -> dict[str, str]:
    """One notice and what kind it was made from."""
    kind = rng.choice(list(NOTICES))
    notice = rng.choice(NOTICES[kind]).format(
        sender=rng.choice(COMPANIES),
        person=rng.choice(PEOPLE),
        goods=rng.choice(GOODS),
        site=rng.choice(SITES),
        reason=rng.choice(REASONS),
        machine=rng.choice(MACHINES),
        date=f"{rng.randint(1, 28)} {rng.choice(MONTHS)}",
        amount=f"{rng.randint(4, 480) * 5} euros",
        ref=f"{rng.choice('ABCDEFGHKLMNPRST')}-{rng.randint(1000, 9999)}",
    )
    return {"id": f"{kind}-{number:03d}", "kind": kind, "notice": notice}


if __name__ == "__main__":
    main()
