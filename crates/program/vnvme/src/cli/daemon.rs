//! `vnvme daemon` and `vnvme check`.

use anyhow::{Result, ensure};
use clap::{ArgMatches, Args, FromArgMatches};
use config::disk::DiskSpec;
use config::disk::no_disks;
use config::files;
use config::options::Command;
use config::options::flags::{self, GivenFlags};
use config::spec::{ProcessSpec, Specs};
use daemon::check::{Findings, check, check_files};
use daemon::keep::{KeeperSession, PreviousConfiguration};
use daemon::log::stderr;
use daemon::manage::{StateLock, read_state, without_configured};
use daemon::serve::options::{Daemon, ServeOptions};
use daemon::serve::{named, serve};
use output::outln;
use std::path::PathBuf;
use std::sync::Arc;

/// Configuration of `vnvme daemon`.
#[derive(Args)]
struct Named {
    /// TOML file with [[controller]], [[vhost-user-blk]], [[nvme-tcp]], [[ublk]] and [process]
    /// tables, or a folder of such files (*.toml, in order of their names)
    #[allow(
        rustdoc::broken_intra_doc_links,
        reason = "help text, in which brackets are TOML"
    )]
    #[arg(long, short, value_name = "FILE|DIR")]
    config: Option<PathBuf>,
}

/// Options of `vnvme daemon`.
pub struct DaemonArgs {
    named: Named,
    given: GivenFlags,
}

impl FromArgMatches for DaemonArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            named: Named::from_arg_matches(matches)?,
            given: GivenFlags::of(Command::Daemon, matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for DaemonArgs {
    fn augment_args(cli: clap::Command) -> clap::Command {
        flags::augment(Command::Daemon, Named::augment_args(cli))
    }

    fn augment_args_for_update(cli: clap::Command) -> clap::Command {
        Self::augment_args(cli)
    }
}

impl DaemonArgs {
    /// Serves until a termination signal.
    pub fn run(self, mut keeper: KeeperSession) -> Result<()> {
        let (specs, options) = self.merge(&mut keeper)?;
        serve(&specs, &options, keeper)
    }

    fn merge(self, keeper: &mut KeeperSession) -> Result<(Specs, ServeOptions)> {
        let config = self.named.config;
        let before = keeper.previous_configuration()?;
        let is_first = before.is_none();
        let PreviousConfiguration {
            configured: specs,
            added,
            process,
            unavailable,
            settings,
            file,
        } = match before {
            Some(before) => before,
            None => {
                let read = config.as_deref().map(files::read).transpose()?;
                let mut specs = read.unwrap_or_default();
                let process = specs.process.clone();
                self.given.merge_process(&mut specs)?;
                PreviousConfiguration {
                    file: DiskSpec::by_name(&specs),
                    configured: specs,
                    process,
                    ..PreviousConfiguration::default()
                }
            }
        };
        let mut options = ServeOptions::new(specs.process.clone(), 1);
        let lock = options.state.as_deref().map(StateLock::take).transpose()?;
        let kept = match &options.state {
            Some(path) if is_first => {
                DiskSpec::all(&without_configured(path, read_state(path)?, &specs))
            }
            _ => added,
        };
        options.read_from.clone_from(&config);
        options.unavailable = unavailable;
        options.settings = settings;
        options.daemon = Some(Daemon {
            config,
            process,
            kept,
            file,
            _lock: lock.map(Arc::new),
        });
        Ok((specs, options))
    }
}

/// Arguments of `vnvme check`.
#[derive(Args)]
pub struct CheckArgs {
    /// Configuration file or folder, as for vnvme daemon --config
    #[arg(value_name = "FILE|DIR")]
    config: PathBuf,
    /// Check the syntax alone: open no volume, and look for no file, user or group
    #[arg(long)]
    offline: bool,
}

impl CheckArgs {
    /// Validates a configuration and lists its disks.
    pub fn run(self) -> Result<()> {
        let specs = files::read(&self.config)?;
        ensure!(
            !specs.is_empty() || specs.process != ProcessSpec::default(),
            "{}: {}",
            self.config.display(),
            no_disks()
        );
        let mut options = ServeOptions::new(specs.process.clone(), 1);
        options.daemon = Some(Daemon::default());
        let specs = named(&specs, &options)?;
        check(&specs, options.control.as_deref(), &options.answers)?;
        if !self.offline {
            let Findings { errors, in_use } = check_files(&specs);
            for error in in_use {
                tracing::warn!("{error:#}; the daemon needs it unless it is that process");
            }
            let mut errors = errors.into_iter();
            if let Some(last) = errors.next_back() {
                for error in errors {
                    stderr::say(format_args!("{error:#}"));
                }
                return Err(last);
            }
        }
        for disk in DiskSpec::all(&specs) {
            let socket = disk
                .socket()
                .map_or(String::new(), |path| format!(" at {}", path.display()));
            let volumes = disk.volumes().join(", ");
            outln!(
                "{}: {} \"{}\"{socket}: {volumes}",
                disk.origin(),
                disk.kind(),
                disk.name()
            );
        }
        Ok(())
    }
}
