//! The command line.

mod ana;
mod completion;
mod configuration;
mod daemon;
mod devices;
mod disks;
mod events;
mod explain;
mod export;
mod given;
pub mod instances;
mod limits;
mod log;
mod merge;
mod metrics;
mod namespaces;
mod on_error;
mod path;
mod stats;
pub mod table;
pub mod target;
mod ublk;
mod upgrade;
mod volume_help;

use self::ana::AnaArgs;
use self::completion::CompletionArgs;
use self::configuration::{ApplyArgs, ReloadArgs, SaveArgs};
use self::daemon::{CheckArgs, DaemonArgs};
use self::devices::{ResumeArgs, SuspendArgs};
use self::disks::{AcceptArgs, AddArgs, ListArgs, RemoveArgs, ShowArgs};
use self::events::EventsArgs;
pub use self::explain::explain;
use self::export::{ExportArgs, ExportsArgs, UnexportArgs};
use self::limits::LimitsArgs;
use self::metrics::MetricsArgs;
use self::namespaces::{AttachArgs, DetachArgs, ResizeArgs};
use self::on_error::OnErrorArgs;
use self::path::PathArgs;
use self::stats::StatsArgs;
use self::ublk::UblkArgs;
use self::upgrade::UpgradeArgs;
use crate::bench;
use crate::bind::BindArgs;
use crate::cli::log::Filter;
use crate::cli::volume_help::volume_help;
use crate::devices::DevicesArgs;
use crate::discover::DiscoverArgs;
use crate::info;
use crate::top::TopArgs;
use ::daemon::keep::KeeperSession;
use ::daemon::log::format::{self, JournalLines, LogFormat};
use ::daemon::log::stderr::LogLines;
use ::daemon::serve::options::ServeOptions;
use ::daemon::serve::serve;
use anyhow::{Context, Result, ensure};
use clap::{ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use config::options;
use config::options::flags::{self, GivenFlags};
use std::path::PathBuf;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Virtual NVMe disks for virtual machines, served by an ordinary process over vfio-user.
#[derive(Parser)]
#[command(version, max_term_width = 120)]
pub struct Cli {
    /// Log filter for standard error: error, warn, info, debug, trace, or per crate like
    /// "info,controller=trace" [default: info when serving, else warn]
    #[arg(long, global = true, env = "VNVME_LOG", value_name = "FILTER")]
    log: Option<Filter>,
    /// Log format [default: journal if standard error is systemd's journal, else text]
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve volumes as namespaces of a virtual NVMe controller
    #[command(after_long_help = serve_help())]
    Serve(Box<ServeArgs>),
    /// Serve the disks of a configuration, and disks added at run time
    #[command(after_long_help = DAEMON_HELP)]
    Daemon(Box<DaemonArgs>),
    /// Validate a configuration, and list its disks
    Check(CheckArgs),
    /// Serve volumes as block devices of this host, /dev/ublkbN, through the kernel's ublk driver
    /// (as root)
    Ublk(Box<UblkArgs>),
    /// List the disks of the running vnvme
    List(ListArgs),
    /// Show a disk and its namespaces
    Show(ShowArgs),
    /// Add a disk to the running vnvme
    Add(AddArgs),
    /// Remove a disk after its outstanding requests. A running guest loses an NVMe disk this way:
    /// detach its namespaces instead
    Remove(RemoveArgs),
    /// Confirm that another file or volume at the place of a disk's volume is to be that volume.
    /// The disk is unavailable until then, because its guest has the former one
    Accept(AcceptArgs),
    /// Make what is served be what a configuration file says; nothing is changed if anything of it
    /// is refused
    Apply(ApplyArgs),
    /// Reread and apply the configuration of the running vnvme
    Reload(ReloadArgs),
    /// Replace the running daemon with the binary now installed at its path. Guests with NVMe disks
    /// notice a pause
    Upgrade(UpgradeArgs),
    /// Write the disks of the running vnvme as a configuration file
    Save(SaveArgs),
    /// Attach a namespace to a controller; the guest sees a new disk without a reset
    Attach(AttachArgs),
    /// Detach a namespace from a controller; the guest loses the disk
    Detach(DetachArgs),
    /// Resize a disk and its volume
    Resize(ResizeArgs),
    /// Export a disk over NBD, for a backup or to restore it
    Export(ExportArgs),
    /// List exports
    Exports(ExportsArgs),
    /// End the exports of a disk
    Unexport(UnexportArgs),
    /// Show or change limits and weights of volumes
    Limits(Box<LimitsArgs>),
    /// Show or change the error policy of volumes: report errors to the guest, retry, or stop until
    /// "vnvme resume"
    OnError(Box<OnErrorArgs>),
    /// Show or change the path of namespaces to a device: direct or generic
    Path(PathArgs),
    /// Show or change the ANA states of a subsystem's disks, for multipath and fail-over
    Ana(AnaArgs),
    /// Suspend a device for a reset, power loss or firmware update; commands of its guests wait
    Suspend(SuspendArgs),
    /// Resume a disk stopped by an error, or a suspended device; waiting commands are repeated
    Resume(ResumeArgs),
    /// Show counters
    Stats(StatsArgs),
    /// Show the activity of disks live in the terminal
    Top(TopArgs),
    /// Print metrics in the text format of Prometheus
    Metrics(MetricsArgs),
    /// Print events: clients, disks, sizes, errors
    Events(EventsArgs),
    /// Print the shell's completion script for commands, options and names of running disks
    Completion(CompletionArgs),
    /// Show identity and health of an NVMe device, or the properties of another volume
    Info(info::InfoArgs),
    /// Load a disk and measure it, with fio's options
    #[command(after_long_help = bench::HELP)]
    Bench(Box<bench::BenchArgs>),
    /// Show this machine's NVMe devices with their users, and the kernel's features
    Devices(DevicesArgs),
    /// Show the subsystems and addresses that a discovery controller reports
    Discover(DiscoverArgs),
    /// Bind NVMe devices to vfio-pci for nvme:// (as root; refused while a disk is in use)
    Bind(BindArgs),
    /// Return NVMe devices to the kernel's driver
    Unbind(BindArgs),
}

fn serve_help() -> String {
    format!("{}\n{SERVE_HELP}", volume_help())
}

const SERVE_HELP: &str = "\
Attach the disk with QEMU 10.1 or newer; the guest's RAM must be shared:
  vnvme serve --socket /tmp/vm0.sock disk.raw &
  qemu-system-x86_64 -machine q35,memory-backend=mem \\
    -object memory-backend-memfd,id=mem,size=2G,share=on -m 2G \\
    -device '{\"driver\":\"vfio-user-pci\",
              \"socket\":{\"type\":\"unix\",\"path\":\"/tmp/vm0.sock\"}}' ...
With Cloud Hypervisor:
  cloud-hypervisor --memory size=2G,shared=on \\
    --user-device socket=/tmp/vm0.sock ...

For a guest with a virtio driver:
  vnvme serve --vhost-user-blk /tmp/vm1.sock disk.raw &
  qemu-system-x86_64 ... \\
    -chardev socket,id=disk,path=/tmp/vm1.sock,reconnect-ms=1000 \\
    -device vhost-user-blk-pci,chardev=disk
A restarted daemon resubmits the requests that the previous process had
outstanding.

A disk remains available to the next VMM after its VMM has ended.

Signals:
  SIGTERM, SIGINT, SIGQUIT  make all data durable, then exit; another one a
                            second or more later exits at once
  SIGUSR2                   replace the process with the binary now installed
                            at its path, like \"vnvme upgrade\" (--keeper)
  SIGHUP, SIGUSR1           logged, without effect
Another process follows one that fails or is killed, and guests with NVMe disks
notice a pause (--keeper).

Exit status: 0 after a signal, 1 after an error, 2 for an invalid command line.";

const DAEMON_HELP: &str = "\
A daemon may start without disks and add or remove them at run time through its
control socket. SIGHUP, like \"vnvme reload\", rereads --config: new disks are
added, missing ones removed, and changed ones changed where possible. If any
change is impossible, the log names it and nothing is changed. Other signals and
exit statuses are those of \"vnvme serve\".

To take a disk from a running guest, detach its namespaces: QEMU ends when a
vfio-user device is unplugged.

The sandbox permits only files below the folders of --allow:
  vnvme daemon --config /etc/vnvme --allow /var/lib/vnvme,/run/vnvme \\
    --control /run/vnvme/control.sock";

/// Volumes and sockets of `vnvme serve`.
#[derive(Args)]
struct Named {
    /// Volumes, each a namespace: paths or URLs
    #[arg(requires = "socket", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Unix socket to listen on; created with mode 0600, replaces a stale one
    #[arg(long, short, requires = "volumes", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Also serve a volume as a virtio block device on its own vhost-user socket; may be repeated
    #[arg(long, num_args = 2, value_names = ["SOCKET", "VOLUME"])]
    vhost_user_blk: Vec<String>,
    /// Also serve a volume to other hosts over NVMe/TCP; may be repeated
    #[arg(long, num_args = 2, value_names = ["ADDRESS:PORT", "VOLUME"])]
    nvme_tcp: Vec<String>,
    /// Serve the [[controller]], [[vhost-user-blk]], [[nvme-tcp]] and [[ublk]] tables of a TOML
    /// file instead; keys have the options' names
    #[arg(
        long,
        short,
        conflicts_with_all = ["volumes", "socket", "vhost_user_blk", "nvme_tcp"],
        value_name = "FILE",
    )]
    config: Option<PathBuf>,
    /// Stop, as after SIGTERM, when the parent process with this number ends
    #[arg(long, hide = true, value_name = "PID")]
    end_with_parent: Option<i32>,
}

/// Options of `vnvme serve`.
struct ServeArgs {
    named: Named,
    /// Options from the tables of [`config::options`].
    given: GivenFlags,
}

impl FromArgMatches for ServeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            named: Named::from_arg_matches(matches)?,
            given: GivenFlags::of(options::Command::Serve, matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ServeArgs {
    fn augment_args(cli: clap::Command) -> clap::Command {
        flags::augment(options::Command::Serve, Named::augment_args(cli))
    }

    fn augment_args_for_update(cli: clap::Command) -> clap::Command {
        Self::augment_args(cli)
    }
}

/// Installs the logger on standard error.
pub fn init_logging(filter: Filter, format: LogFormat) {
    format::set(format);
    // With internal error reports, a line that cannot be written (the pipe's reader or the terminal
    // has closed it) is a panic of its thread.
    let lines = tracing_subscriber::fmt::layer().log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => {
            let lines = lines.fmt_fields(format::EscapedFields::default());
            let lines = lines.with_writer(|| LogLines);
            lines.with_ansi(format::has_colours()).boxed()
        }
        LogFormat::Json => lines.json().with_writer(|| LogLines).boxed(),
        LogFormat::Journal => {
            let lines = lines.fmt_fields(format::EscapedFields::default());
            let lines = lines.with_ansi(false).without_time().with_level(false);
            lines.with_writer(JournalLines).boxed()
        }
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(filter.0))
        .init();
}

impl Cli {
    /// Returns the log filter.
    pub fn log(&self) -> Filter {
        match (&self.log, &self.command) {
            (Some(filter), _) => filter.clone(),
            (None, Command::Serve(_) | Command::Daemon(_) | Command::Ublk(_)) => {
                Filter::level(LevelFilter::INFO)
            }
            (None, _) => Filter::level(LevelFilter::WARN),
        }
    }

    /// Returns the format of log lines.
    pub fn log_format(&self) -> LogFormat {
        self.log_format.unwrap_or_else(LogFormat::usual)
    }

    /// Runs the command.
    pub fn run(self, keeper: KeeperSession) -> Result<()> {
        match self.command {
            Command::Serve(args) => args.run(keeper),
            Command::Daemon(args) => args.run(keeper),
            Command::Check(args) => args.run(),
            Command::Ublk(args) => args.run(keeper),
            Command::List(args) => args.run(),
            Command::Show(args) => args.run(),
            Command::Add(args) => args.run(),
            Command::Remove(args) => args.run(),
            Command::Accept(args) => args.run(),
            Command::Apply(args) => args.run(),
            Command::Reload(args) => args.run(),
            Command::Save(args) => args.run(),
            Command::Attach(args) => args.run(),
            Command::Detach(args) => args.run(),
            Command::Resize(args) => args.run(),
            Command::Export(args) => args.run(),
            Command::Exports(args) => args.run(),
            Command::Unexport(args) => args.run(),
            Command::Limits(args) => args.run(),
            Command::OnError(args) => args.run(),
            Command::Path(args) => args.run(),
            Command::Ana(args) => args.run(),
            Command::Upgrade(args) => args.run(),
            Command::Suspend(args) => args.run(),
            Command::Resume(args) => args.run(),
            Command::Stats(args) => args.run(),
            Command::Top(args) => args.run(),
            Command::Metrics(args) => args.run(),
            Command::Events(args) => args.run(),
            Command::Completion(args) => args.run(),
            Command::Info(args) => args.run(),
            Command::Bench(args) => args.run(),
            Command::Devices(args) => args.run(),
            Command::Discover(args) => args.run(),
            Command::Bind(args) => args.bind(),
            Command::Unbind(args) => args.unbind(),
        }
    }
}

/// Requests SIGTERM for this process when the parent process `parent` ends; an error if it has
/// ended already. The kernel sends the signal when the thread that started this process ends.
fn end_with(parent: i32) -> Result<()> {
    let signal = Some(rustix::process::Signal::TERM);
    rustix::process::set_parent_process_death_signal(signal).context("prctl")?;
    let found = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(found == Some(parent), "process {parent} is not the parent");
    Ok(())
}

impl ServeArgs {
    fn run(self, mut keeper: KeeperSession) -> Result<()> {
        // A kept process ends with its keeper, which ends with the parent.
        if let Some(parent) = self.named.end_with_parent
            && !keeper.is_kept()
        {
            end_with(parent)?;
        }
        let (specs, options) = match keeper.previous_configuration()? {
            Some(before) => {
                let options = ServeOptions::new(before.configured.process.clone(), 1);
                let options = ServeOptions {
                    unavailable: before.unavailable,
                    settings: before.settings,
                    ..options
                };
                (before.configured, options)
            }
            None => self.merge()?,
        };
        serve(&specs, &options, keeper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use config::spec::Specs;

    #[test]
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_arguments_become_namespaces() {
        let cli = Cli::try_parse_from([
            "vnvme",
            "serve",
            "-s",
            "/tmp/a",
            "-b",
            "4096",
            "a",
            "mem://1G?nsid=9",
        ])
        .unwrap();
        let Command::Serve(args) = cli.command else {
            panic!("serve is not serve");
        };
        let specs = args.merge().unwrap().0.controllers;
        assert_eq!(specs[0].namespaces.len(), 2);
        assert_eq!(specs[0].namespaces[0].block_size, Some(4096));
        assert_eq!(specs[0].namespaces[1].nsid, Some(9));
        assert!(
            Cli::try_parse_from(["vnvme", "serve", "disk.raw"]).is_err(),
            "no socket"
        );
        assert!(
            Cli::try_parse_from(["vnvme", "serve", "-s", "/tmp/a"]).is_err(),
            "no volume"
        );
        assert!(Cli::try_parse_from(["vnvme", "serve", "-c", "f", "-s", "/tmp/a", "b"]).is_err());
    }

    #[test]
    fn exports_are_configured_with_or_without_controller() {
        let specs = |args: &[&str]| -> Specs {
            let all = ["vnvme", "serve"].iter().chain(args);
            let Command::Serve(args) = Cli::try_parse_from(all).unwrap().command else {
                panic!("serve is not serve");
            };
            args.merge().unwrap().0
        };
        let export = ["--vhost-user-blk", "/tmp/v", "a.raw?queues=2"];
        let alone = specs(&[&export[..], &["-r", "--no-write-cache"]].concat());
        assert!(alone.controllers.is_empty());
        let blk = &alone.vhost_user_blk[0];
        let ns = &blk.namespace;
        assert_eq!((&*ns.volume, blk.queues), ("a.raw", Some(2)));
        assert_eq!((ns.read_only, blk.write_cache), (Some(true), Some(false)));
        let second = [
            "--vhost-user-blk",
            "/tmp/w",
            "mem://1M",
            "-s",
            "/tmp/a",
            "b.raw",
        ];
        let beside = specs(&[&export[..], &second].concat());
        assert_eq!(beside.controllers[0].namespaces.len(), 1);
        assert_eq!(beside.vhost_user_blk.len(), 2);
        assert_eq!(beside.vhost_user_blk[1].namespace.read_only, None);
        let refused = |args: &[&str]| {
            let all = ["vnvme", "serve"].iter().chain(args);
            assert!(Cli::try_parse_from(all).is_err(), "{args:?}");
        };
        refused(&["--vhost-user-blk", "/tmp/v"]);
        refused(&["--vhost-user-blk", "/tmp/v", "a", "b"]);
        refused(&["--vhost-user-blk", "/tmp/v", "a", "-s", "/tmp/s"]);
        refused(&["--vhost-user-blk", "/tmp/v", "a", "-c", "f"]);
    }
}
