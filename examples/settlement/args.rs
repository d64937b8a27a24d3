//! The command line.

/// What `--help` says.
pub(crate) const HELP: &str = "\
Settles the payouts of examples/data/payouts.csv into a double-entry ledger. Two worker processes
compete for the lease; one is frozen in mid-batch, loses its lease while it sleeps, wakes up, and is
refused by the database. At the end everything is checked.

Usage: cargo run --release --example settlement [-- --postgres URL --redis URL]

Without options it runs in a temporary SQLite file, and needs no server.

  --postgres URL  keep ledger and fence in this database: the ledger in a schema of its own, which
                  is dropped at the end; the fence in the schema `fencerow`, which stays
  --redis URL     take the leases from this server
  -h, --help      say this

Exit code: 0 if every check holds, 1 if one fails or the run does, 2 for other arguments.
";

/// What the program is asked to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Help,
    Embedded,
    Servers { postgres: String, redis: String },
}

/// Reads the arguments; an error is a sentence for whoever gave them.
pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Command, String> {
    let (mut postgres, mut redis) = (None, None);
    while let Some(arg) = args.next() {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        let target = match name {
            "-h" | "--help" => return Ok(Command::Help),
            "--postgres" => &mut postgres,
            "--redis" => &mut redis,
            _ => return Err(format!("there is no option {arg:?}")),
        };
        let url = value.or_else(|| args.next()).filter(|url| !url.is_empty());
        let url = url.ok_or_else(|| format!("{name} needs a URL"))?;
        if target.replace(url).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    match (postgres, redis) {
        (None, None) => Ok(Command::Embedded),
        (Some(postgres), Some(redis)) => Ok(Command::Servers { postgres, redis }),
        (Some(_), None) => Err("--postgres needs --redis as well, for the leases".to_owned()),
        (None, Some(_)) => Err("--redis needs --postgres as well, for the ledger".to_owned()),
    }
}
