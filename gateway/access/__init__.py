"""Who may use the gateway, how much, and what was used: keys, limits, usage, and the admin API over them.

    keys       what a key is, how it is made and checked        keyring   keys, cached: no database on the hot path
    store      the database: keys and usage                     ledger    usage on its way into the database
    windows    rates of requests and tokens                     tally     requests at once, and budgets
    gate       what a request passes on its way in and out      admin     the routes of an operator

Only `gate` knows all of them; the rest of the gateway knows `gate`.
"""
