//! `vnvme ublk`.

use anyhow::{Context, Result};
use clap::{ArgMatches, Args, FromArgMatches};
use config::choices::Spread;
use config::options::flags::{self, GivenFlags};
use config::options::{Command, url};
use config::spec::{MAX_WORKERS, Specs, UblkSpec};
use daemon::keep::KeeperSession;
use daemon::parts::remove_ublk;
use daemon::serve::options::ServeOptions;
use daemon::serve::serve;

/// Volumes of `vnvme ublk`.
#[derive(Args)]
struct Named {
    /// Volumes, each a block device: paths or URLs, as for vnvme serve
    #[arg(required_unless_present = "remove", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Remove device N, left behind by a killed process
    #[arg(long, conflicts_with = "volumes", value_name = "N")]
    remove: Option<u32>,
}

/// Options of `vnvme ublk`.
pub struct UblkArgs {
    named: Named,
    given: GivenFlags,
}

impl FromArgMatches for UblkArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            named: Named::from_arg_matches(matches)?,
            given: GivenFlags::of(Command::Ublk, matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for UblkArgs {
    fn augment_args(cli: clap::Command) -> clap::Command {
        flags::augment(Command::Ublk, Named::augment_args(cli))
    }

    fn augment_args_for_update(cli: clap::Command) -> clap::Command {
        Self::augment_args(cli)
    }
}

impl UblkArgs {
    /// Serves until a termination signal.
    pub fn run(self, keeper: KeeperSession) -> Result<()> {
        if let Some(id) = self.named.remove {
            return remove_ublk(id).map_err(Into::into);
        }
        let (specs, options) = self.merge()?;
        serve(&specs, &options, keeper)
    }

    /// Returns the disks and options of the process.
    fn merge(self) -> Result<(Specs, ServeOptions)> {
        let volumes = self.named.volumes.iter().map(|text| url::parse(text));
        let mut specs = Specs {
            ublk: volumes.collect::<Result<_>>()?,
            ..Specs::default()
        };
        self.given.merge(None, &mut specs)?;
        // `--id` is the number of the first device.
        for (disk, i) in specs.ublk.iter_mut().zip(0..) {
            if let Some(first) = disk.id {
                let id = first.checked_add(i);
                disk.id = Some(id.context("--id: the numbers are too large")?);
            }
        }
        let queues = specs.ublk.first().map_or(1, UblkSpec::queues);
        let mut process = specs.process.clone();
        process.spread = Some(Spread::Off);
        let options = ServeOptions::new(process, queues.clamp(1, MAX_WORKERS));
        Ok((specs, options))
    }
}
