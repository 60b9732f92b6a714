"""The ten kinds of newswire stories (beats): their subjects, their facts, and phrasings of statements and questions.

`{s}` is the subject of the story, a name that no other story has; `{a}` is the value of the fact. A question names the
subject and asks for one value. The first fact of a beat opens the story, so its statements name the subject.
"""

from __future__ import annotations

from dataclasses import dataclass

from mac_rag.data.newswire import world as world


@dataclass(frozen=True)
class Fact:
    """One fact about a subject.

    Attributes:
        draw: name of the `World` method that draws the value, or the list that it is chosen from.
        statements: phrasings of the statement.
        questions: phrasings of the question.
    """

    draw: str | tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Beat:
    """One kind of story.

    Attributes:
        name: name of the kind.
        subject: name of the `World` method that draws the subject.
        facts: the facts that a story tells.
    """

    name: str
    subject: str
    facts: tuple[Fact, ...]


BEATS = (
    Beat(
        "appointment",
        "company",
        (
            Fact(
                "person",
                (
                    "{s} has named {a} to its board.",
                    "{a} will join the board of {s}.",
                    "The board of {s} has a new member, {a}.",
                ),
                (
                    "Who joined the board of {s}?",
                    "Whom did {s} name to its board?",
                    "Who is the new board member of {s}?",
                ),
            ),
            Fact(
                world.ROLES,
                ("The newcomer starts as {a}.", "The post of {a} comes with the seat.", "The job is that of {a}."),
                ("What post was filled at {s}?", "As what does the newcomer at {s} start?"),
            ),
            Fact(
                "person",
                (
                    "The seat was held by {a} until now.",
                    "{a}, who held the seat before, retires.",
                    "The move follows the exit of {a}.",
                ),
                ("Who left the board of {s}?", "Who held the seat at {s} before?", "Whose exit did {s} announce?"),
            ),
            Fact(
                "count",
                ("The company employs {a} people.", "It has {a} workers.", "Its staff now numbers {a}."),
                ("How many people does {s} employ?", "How many workers does {s} have?"),
            ),
        ),
    ),
    Beat(
        "takeover",
        "company",
        (
            Fact(
                "company",
                (
                    "{s} has agreed to buy {a}.",
                    "{a} is to be taken over by {s}.",
                    "{s} said it would acquire {a}.",
                ),
                ("Which company did {s} buy?", "What did {s} agree to acquire?", "Which firm was taken over by {s}?"),
            ),
            Fact(
                "millions",
                ("The price is {a}.", "The deal is worth {a}.", "Shareholders will receive {a}."),
                ("How much did {s} pay in the takeover?", "What is the deal of {s} worth?"),
            ),
            Fact(
                "person",
                (
                    "{a} led the talks.",
                    "The deal was arranged by {a}.",
                    "The banker {a} advised the buyer.",
                ),
                ("Who arranged the deal for {s}?", "Who led the takeover talks of {s}?"),
            ),
            Fact(
                "town",
                (
                    "The joint head office will be in {a}.",
                    "Both firms will move to {a}.",
                    "Headquarters will be moved to {a}.",
                ),
                ("Where will the head office of {s} be?", "To which town will {s} move?"),
            ),
        ),
    ),
    Beat(
        "plant",
        "company",
        (
            Fact(
                "town",
                (
                    "{s} is building a new site in {a}.",
                    "{a} was chosen by {s} for its new site.",
                    "{s} breaks ground in {a}.",
                ),
                ("Where is {s} building its new site?", "Which town did {s} choose?", "In which town does {s} build?"),
            ),
            Fact(
                world.FACILITIES,
                ("It will be a {a}.", "Plans show a {a}.", "The project is a {a}."),
                ("What is {s} building?", "What kind of site does {s} plan?"),
            ),
            Fact(
                "count",
                ("The site will bring {a} jobs.", "Some {a} jobs are promised.", "It is to hire {a} people."),
                ("How many jobs will {s} bring?", "How many people will the new site of {s} hire?"),
            ),
            Fact(
                "millions",
                ("Construction costs {a}.", "The budget is {a}.", "The firm will spend {a}."),
                ("How much will {s} spend on its site?", "What is the budget of the site of {s}?"),
            ),
        ),
    ),
    Beat(
        "election",
        "town",
        (
            Fact(
                "person",
                ("{a} was elected mayor of {s}.", "Voters in {s} chose {a} as mayor.", "The new mayor of {s} is {a}."),
                ("Who was elected mayor of {s}?", "Who is the mayor of {s}?", "Whom did voters in {s} choose?"),
            ),
            Fact(
                "percent",
                ("The winner took {a} of the vote.", "The result was {a}.", "The final tally gave the winner {a}."),
                ("What share of the vote did the winner in {s} take?", "How large was the vote for the mayor of {s}?"),
            ),
            Fact(
                "person",
                ("{a} came second.", "The defeated rival was {a}.", "{a} conceded late at night."),
                ("Who lost the election in {s}?", "Who was the defeated rival in {s}?"),
            ),
            Fact(
                "count",
                ("In all, {a} ballots were cast.", "Turnout was {a} voters.", "Officials counted {a} votes."),
                ("How many ballots were cast in {s}?", "How many votes were counted in {s}?"),
            ),
        ),
    ),
    Beat(
        "match",
        "club",
        (
            Fact(
                "club",
                ("{s} beat {a} in the cup.", "{a} lost to {s}.", "{s} knocked out {a}."),
                ("Whom did {s} beat?", "Which club lost to {s}?", "Which club did {s} knock out?"),
            ),
            Fact(
                "score",
                ("The score was {a}.", "It ended {a}.", "The final whistle came at {a}."),
                ("What was the score of {s}?", "How did the match of {s} end?"),
            ),
            Fact(
                "person",
                ("{a} scored first.", "The opening goal came from {a}.", "{a} struck the first goal."),
                ("Who scored first for {s}?", "Who struck the opening goal for {s}?"),
            ),
            Fact(
                "count",
                ("A crowd of {a} watched.", "There were {a} spectators.", "Attendance was {a}."),
                ("How many spectators watched {s}?", "How large was the crowd at the match of {s}?"),
            ),
        ),
    ),
    Beat(
        "discovery",
        "institute",
        (
            Fact(
                "person",
                (
                    "{a} of {s} reports a discovery.",
                    "A team at {s} led by {a} has made a discovery.",
                    "{s} credits {a} with a discovery.",
                ),
                ("Who made the discovery at {s}?", "Who led the team at {s}?", "Whom does {s} credit?"),
            ),
            Fact(
                world.FINDINGS,
                ("The find is an unknown {a}.", "It is a new kind of {a}.", "The team describes a rare {a}."),
                ("What did the team at {s} discover?", "What kind of find does {s} report?"),
            ),
            Fact(
                "town",
                ("It was found near {a}.", "The trail began outside {a}.", "Samples came from {a}."),
                ("Where did the find of {s} come from?", "Near which town did {s} find it?"),
            ),
            Fact(
                "company",
                ("The work was paid for by {a}.", "{a} funded the study.", "Money came from {a}."),
                ("Who funded the study at {s}?", "Which company paid for the work at {s}?"),
            ),
        ),
    ),
    Beat(
        "prize",
        "person",
        (
            Fact(
                "title",
                ("{s} won a prize for {a}.", "The prize went to {s} for {a}.", "{a} has won {s} a prize."),
                ("For which work did {s} win a prize?", "What is the title of the work by {s}?"),
            ),
            Fact(
                world.GENRES,
                ("The jury praised the {a}.", "The {a} took years to finish.", "Critics had called the {a} bold."),
                ("What kind of work did {s} make?", "What did the jury of {s} praise?"),
            ),
            Fact(
                "thousands",
                ("The award comes with {a}.", "The purse is {a}.", "It is worth {a}."),
                ("How much money did {s} win?", "What is the award of {s} worth?"),
            ),
            Fact(
                "town",
                ("The ceremony was held in {a}.", "Guests gathered in {a}.", "It was handed over in {a}."),
                ("Where was the prize given to {s}?", "In which town was {s} honoured?"),
            ),
        ),
    ),
    Beat(
        "disaster",
        "town",
        (
            Fact(
                world.CAUSES,
                ("A {a} has hit {s}.", "{s} was struck by a {a}.", "People fled {s} after a {a}."),
                ("What hit {s}?", "What struck {s}?", "Why did people flee {s}?"),
            ),
            Fact(
                "count",
                ("At least {a} people were hurt.", "Doctors treated {a} people.", "The injured number {a}."),
                ("How many people were hurt in {s}?", "How many injured were there in {s}?"),
            ),
            Fact(
                "person",
                ("{a} leads the rescue.", "The rescue chief is {a}.", "Crews are directed by {a}."),
                ("Who leads the rescue in {s}?", "Who is the rescue chief in {s}?"),
            ),
            Fact(
                "millions",
                ("Damage is put at {a}.", "Losses may reach {a}.", "Insurers expect to pay {a}."),
                ("How large is the damage in {s}?", "What losses are expected in {s}?"),
            ),
        ),
    ),
    Beat(
        "trial",
        "person",
        (
            Fact(
                world.CHARGES,
                ("{s} was convicted of {a}.", "A court found {s} guilty of {a}.", "{s} must answer for {a}."),
                ("Of what was {s} convicted?", "What was the crime of {s}?", "What was {s} found guilty of?"),
            ),
            Fact(
                "person",
                ("{a} was the judge.", "The ruling came from judge {a}.", "Judge {a} read the verdict."),
                ("Who was the judge of {s}?", "Who read the verdict on {s}?"),
            ),
            Fact(
                "thousands",
                ("The fine is {a}.", "A fine of {a} was set.", "The court asked for {a}."),
                ("How large is the fine of {s}?", "What must {s} pay?"),
            ),
            Fact(
                "company",
                ("The case began with a complaint by {a}.", "The victim was {a}.", "{a} had brought the charges."),
                ("Who brought the charges against {s}?", "Which company was the victim of {s}?"),
            ),
        ),
    ),
    Beat(
        "results",
        "company",
        (
            Fact(
                "millions",
                ("{s} posted a profit of {a}.", "Profit at {s} came to {a}.", "{s} earned {a} in the year."),
                ("How much profit did {s} post?", "What did {s} earn?", "What was the profit of {s}?"),
            ),
            Fact(
                "person",
                (
                    "{a} presented the figures.",
                    "The results were read out by {a}.",
                    "Analyst {a} called it a surprise.",
                ),
                ("Who commented on the results of {s}?", "Who spoke about the figures of {s}?"),
            ),
            Fact(
                "town",
                ("Sales were best in {a}.", "The branch in {a} did best.", "Demand rose most in {a}."),
                ("Where did {s} sell most?", "Which branch of {s} did best?"),
            ),
            Fact(
                "percent",
                ("Its shares gained {a}.", "The stock rose {a}.", "Shares closed up {a}."),
                ("How much did the shares of {s} gain?", "By how much did the stock of {s} rise?"),
            ),
        ),
    ),
)
