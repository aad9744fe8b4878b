//! Merges the options of `vnvme serve` with its configuration file.
//!
//! An option applies to every entry of its kind, or is refused with an error; none is ignored. A
//! value in an entry of the file (or in a volume's URL) overrides an option that only gives a
//! default.

use super::{Named, ServeArgs};
use anyhow::Result;
use config::options::url;
use config::spec::{ControllerSpec, NvmeTcpSpec, Specs, VhostBlkSpec, read_config};
use config::usage_error::UsageError;
use daemon::serve::options::ServeOptions;

/// Error message of `vnvme serve` without disks, with the ways to name them.
const NOTHING: &str = "\
nothing to serve. Name
  a socket and volumes:   vnvme serve --socket /tmp/vm0.sock disk.raw    (an NVMe disk)
  or an export:           vnvme serve --vhost-user-blk /tmp/vm1.sock disk.raw    (a virtio disk)
  or an address:          vnvme serve --nvme-tcp 127.0.0.1:4420 disk.raw    (for other hosts)
  or a file of them:      vnvme serve --config vnvme.toml    (block devices of this host, too)
\"vnvme ublk disk.raw\" makes a volume a block device; \"vnvme serve --help\" has examples.";

impl ServeArgs {
    /// Disks to serve, and options of the process.
    pub(super) fn merge(self) -> Result<(Specs, ServeOptions)> {
        let config = self.named.config.clone();
        let mut specs = match &config {
            Some(path) => read_config(path)?,
            None => self.named.specs()?,
        };
        self.given.merge(config.as_deref(), &mut specs)?;
        let mut options = ServeOptions::new(specs.process.clone(), 1);
        options.read_from = config;
        Ok((specs, options))
    }
}

impl Named {
    /// Disks named on the command line, without flags.
    fn specs(self) -> Result<Specs> {
        if self.socket.is_none() && self.vhost_user_blk.is_empty() && self.nvme_tcp.is_empty() {
            return Err(UsageError::error(NOTHING));
        }
        let namespaces = self.volumes.iter().map(|text| url::parse(text));
        let namespaces = namespaces.collect::<Result<Vec<_>>>()?;
        let controller = self.socket.map(|socket| ControllerSpec {
            socket,
            namespaces,
            ..ControllerSpec::default()
        });
        let exports = self.vhost_user_blk.chunks_exact(2).map(|pair| match pair {
            [socket, volume] => VhostBlkSpec::parse(socket, volume),
            _ => Err(UsageError::error("--vhost-user-blk SOCKET VOLUME")),
        });
        let targets = self.nvme_tcp.chunks_exact(2).map(|pair| match pair {
            [address, volume] => NvmeTcpSpec::parse(address, volume),
            _ => Err(UsageError::error("--nvme-tcp ADDRESS:PORT VOLUME")),
        });
        Ok(Specs {
            controllers: controller.into_iter().collect(),
            vhost_user_blk: exports.collect::<Result<_>>()?,
            nvme_tcp: targets.collect::<Result<_>>()?,
            ..Specs::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, Command};
    use clap::{CommandFactory, Parser};
    use config::spec::{DoorbellMode, Specs};
    use config::usage_error::UsageError;
    use daemon::serve::options::ServeOptions;

    const FILE: &str = r#"
        [[controller]]
        socket = "/run/a"
        serial = "A"
        [[controller.namespace]]
        volume = "mem://1M"
        [[controller.namespace]]
        volume = "mem://1M?block-size=512"
        [[controller]]
        socket = "/run/b"
        doorbells = "trapped"
        cmb-size = "4M"
        boot-partition = "/other"
        io-queues = 2
        queue-entries = 64
        mdts = 3
        model = "M"
        firmware = "F"
        [[controller.namespace]]
        volume = "mem://1M"
        block-size = 512
        [[vhost-user-blk]]
        socket = "/run/c"
        volume = "mem://1M"
        [[vhost-user-blk]]
        socket = "/run/d"
        volume = { url = "mem://1M", block-size = 512, queues = 2 }
    "#;
    const UBLK: &str =
        "[[ublk]]\nvolume = \"mem://1M\"\n[[ublk]]\nvolume = \"mem://1M?block-size=512\"";

    fn merge(file: &str, args: &[&str]) -> anyhow::Result<(Specs, ServeOptions)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f.toml");
        std::fs::write(&path, file).unwrap();
        let path = path.to_str().unwrap();
        let all = [&["vnvme", "serve", "--config", path], args].concat();
        let Command::Serve(args) = Cli::try_parse_from(all).unwrap().command else {
            panic!("serve is not serve");
        };
        args.merge()
    }

    /// Changes that an option makes to the file's entries: each value as text, `entry.field`.
    type EffectOf = fn(&Specs, &ServeOptions) -> String;

    fn namespaces<T: std::fmt::Debug>(
        specs: &Specs,
        of: impl Fn(&config::spec::NamespaceSpec) -> T,
    ) -> String {
        let all = specs.controllers.iter().flat_map(|c| &c.namespaces);
        format!("{:?}", all.map(of).collect::<Vec<_>>())
    }

    fn controllers<T: std::fmt::Debug>(
        specs: &Specs,
        of: impl Fn(&config::spec::ControllerSpec) -> T,
    ) -> String {
        format!("{:?}", specs.controllers.iter().map(of).collect::<Vec<_>>())
    }

    /// Every option beside `--config` is applied as its row says.
    #[test]
    fn each_option_applies_to_every_entry() {
        let table: &[(&[&str], EffectOf, &str)] = &[
            (
                &["--read-only"],
                |s, _| {
                    let exports: Vec<bool> = s
                        .vhost_user_blk
                        .iter()
                        .map(|e| e.namespace.read_only == Some(true))
                        .collect();
                    format!("{} {exports:?}", namespaces(s, |n| n.is_read_only()))
                },
                "[true, true, true] [true, true]",
            ),
            (
                &["--block-size", "4096"],
                |s, _| {
                    let exports = s.vhost_user_blk.iter().map(|e| &e.namespace);
                    let sizes: Vec<u32> = exports.map(|ns| ns.block_size.unwrap()).collect();
                    format!("{} {sizes:?}", namespaces(s, |n| n.block_size.unwrap()))
                },
                "[4096, 512, 512] [4096, 512]",
            ),
            (
                &["--no-write-cache"],
                |s, _| {
                    let caches: Vec<bool> = s
                        .vhost_user_blk
                        .iter()
                        .map(|e| e.write_cache.unwrap())
                        .collect();
                    format!("{} {caches:?}", controllers(s, |c| c.write_cache.unwrap()))
                },
                "[false, false] [false, false]",
            ),
            (
                &["--write-cache=off"],
                |s, _| controllers(s, |c| c.write_cache.unwrap()),
                "[false, false]",
            ),
            (
                &["--shadow-doorbells=off"],
                |s, _| controllers(s, |c| c.shadow_doorbells.unwrap()),
                "[false, false]",
            ),
            (
                &["--doorbells", "mapped"],
                |s, _| controllers(s, |c| c.doorbells == Some(DoorbellMode::Mapped)),
                "[true, false]",
            ),
            (
                &["--cmb-size", "2M"],
                |s, _| controllers(s, |c| c.cmb_size.map(|size| size.0 >> 20)),
                "[Some(2), Some(4)]",
            ),
            (
                &["--boot-partition", "/boot"],
                |s, _| controllers(s, |c| c.boot_partition.clone().unwrap()),
                "[\"/boot\", \"/other\"]",
            ),
            (
                &["--no-shadow-doorbells"],
                |s, _| controllers(s, |c| c.shadow_doorbells.unwrap()),
                "[false, false]",
            ),
            (
                &["--model", "X"],
                |s, _| controllers(s, |c| c.model.clone().unwrap()),
                r#"["X", "M"]"#,
            ),
            (
                &["--firmware", "X"],
                |s, _| controllers(s, |c| c.firmware.clone().unwrap()),
                r#"["X", "F"]"#,
            ),
            (
                &["--io-queues", "9"],
                |s, _| controllers(s, |c| c.io_queues.unwrap()),
                "[9, 2]",
            ),
            (
                &["--queue-entries", "128"],
                |s, _| controllers(s, |c| c.queue_entries.unwrap()),
                "[128, 64]",
            ),
            (
                &["--mdts", "9"],
                |s, _| controllers(s, |c| c.mdts.unwrap()),
                "[9, 3]",
            ),
            (
                &["--idle-window", "70"],
                |_, o| format!("{:?}", o.polling.idle_window),
                "Fixed(70µs)",
            ),
            (
                &["--max-poll-interval", "900"],
                |_, o| format!("{:?}", o.polling.max_poll_interval),
                "Some(900µs)",
            ),
            (
                &["--pin-memory"],
                |_, o| o.polling.pin_memory.to_string(),
                "true",
            ),
            (&["--sqpoll"], |_, o| o.polling.sqpoll.to_string(), "true"),
            (
                &["--stop-timeout", "9"],
                |_, o| format!("{:?}", o.polling.stop_timeout),
                "9s",
            ),
            (
                &["--previous-timeout", "90"],
                |_, o| format!("{:?}", o.previous.limit),
                "90s",
            ),
            (
                &["--on-read-error", "stop"],
                |s, _| namespaces(s, |n| n.on_read_error),
                "[Some(Stop), Some(Stop), Some(Stop)]",
            ),
            (
                &["--on-write-error", "enospc-stop"],
                |s, _| namespaces(s, |n| n.on_write_error),
                "[Some(EnospcStop), Some(EnospcStop), Some(EnospcStop)]",
            ),
            (&["--workers", "3"], |_, o| o.workers.to_string(), "3"),
            (
                &["--spread", "off"],
                |_, o| format!("{:?}", o.spread),
                "Off",
            ),
            (&["--cpus", "2,3"], |_, o| format!("{:?}", o.cpus), "[2, 3]"),
            (
                &["--client-windows", "77"],
                |_, o| format!("{:?}", o.clients.windows),
                "Some(77)",
            ),
            (
                &["--client-memory", "3G"],
                |_, o| o.clients.memory.bytes.to_string(),
                "3221225472",
            ),
            (
                &["--client-files", "5"],
                |_, o| o.clients.memory.mappings.to_string(),
                "5",
            ),
            (
                &["--client-connects", "7"],
                |_, o| o.clients.connects.0.to_string(),
                "7",
            ),
            (
                &["--control", "/run/ctl"],
                |_, o| format!("{:?}", o.control.as_ref().unwrap()),
                r#""/run/ctl""#,
            ),
            (
                &["--metrics", "[::1]:9469"],
                |_, o| o.metrics.unwrap().to_string(),
                "[::1]:9469",
            ),
            (
                &["--socket-owner", "alice"],
                |s, _| controllers(s, |c| c.access.owner.as_ref().unwrap().to_string()),
                r#"["alice", "alice"]"#,
            ),
            (
                &["--socket-group", "kvm"],
                |s, _| {
                    let groups = s.vhost_user_blk.iter();
                    let groups = groups.map(|e| e.access.group.as_ref().unwrap().to_string());
                    let groups: Vec<String> = groups.collect();
                    format!(
                        "{groups:?} {}",
                        s.controllers[1].access.group.as_ref().unwrap()
                    )
                },
                r#"["kvm", "kvm"] kvm"#,
            ),
            (
                &["--socket-mode", "0666"],
                |s, _| controllers(s, |c| c.access.is_open_to_all()),
                "[true, true]",
            ),
            (
                &["--control-group", "kvm"],
                |_, o| o.control_group.as_ref().unwrap().to_string(),
                "kvm",
            ),
            (
                &["--sandbox", "off"],
                |_, o| format!("{:?}", o.sandbox),
                "Off",
            ),
            (
                &["--keeper", "process"],
                |_, o| format!("{:?}", o.keeper),
                "Process",
            ),
            (
                &["--identity", "path"],
                |_, o| format!("{:?}", o.identity),
                "Path",
            ),
        ];
        for (args, look, wanted) in table {
            let (specs, options) = merge(FILE, args).unwrap();
            assert_eq!(look(&specs, &options), *wanted, "{args:?}");
        }
        // The table below covers all flags: applied ones, refused ones, and those that clap refuses
        // beside --config.
        let others = [
            "cloud",
            "serial",
            "subnqn",
            "socket",
            "vhost-user-blk",
            "nvme-tcp",
            // The option concerns NVMe/TCP subsystems, and the file has none.
            "host-keys",
            "config",
            "end-with-parent",
            "help",
        ];
        let mut cli = Cli::command();
        cli.build();
        let serve = cli.find_subcommand("serve").unwrap();
        for option in serve.get_arguments().filter_map(clap::Arg::get_long) {
            let in_table = table
                .iter()
                .any(|(args, ..)| args[0].split('=').next() == Some(&format!("--{option}")));
            assert!(
                in_table || others.contains(&option) || ["log", "log-format"].contains(&option),
                "--{option} beside --config?"
            );
        }
    }

    #[test]
    fn options_reach_ublk_disks() {
        let (specs, _) = merge(UBLK, &["--read-only", "--block-size", "4096"]).unwrap();
        let volumes = specs.ublk.iter().map(|disk| &disk.namespace);
        assert!(volumes.clone().all(|ns| ns.read_only == Some(true)));
        let sizes: Vec<_> = volumes.map(|ns| ns.block_size).collect();
        assert_eq!(sizes, [Some(4096), Some(512)]);
    }

    #[test]
    fn inapplicable_option_is_refused_with_reason() {
        let export = "[[vhost-user-blk]]\nsocket = \"/run/c\"\nvolume = \"mem://1M\"";
        for (file, args, words) in [
            (
                FILE,
                &["--serial", "S"][..],
                "--serial names one controller",
            ),
            (
                FILE,
                &["--subnqn", "nqn.x"],
                "--subnqn names one controller",
            ),
            (
                UBLK,
                &["--no-write-cache"],
                "[[ublk]] devices have a write cache",
            ),
            (
                export,
                &["--model", "M"],
                "--model applies to NVMe controllers",
            ),
            (
                export,
                &["--mdts", "5"],
                "--mdts applies to NVMe controllers",
            ),
            (export, &["--spread", "off"], "--spread applies to"),
            (export, &["--doorbells", "mapped"], "--doorbells applies to"),
            (
                export,
                &["--no-shadow-doorbells"],
                "--no-shadow-doorbells applies to",
            ),
        ] {
            let error = merge(file, args).unwrap_err();
            assert!(error.to_string().contains(words), "{args:?}: {error}");
            assert!(error.is::<UsageError>(), "exit status 2: {args:?}");
        }
    }

    #[test]
    fn url_means_same_in_file_and_command_line() {
        let file = "[[controller]]\nsocket = \"/run/a\"\n[[controller.namespace]]\n\
                    volume = \"mem://1M?nsid=7&block-size=4096&iops=9\"";
        let (specs, _) = merge(file, &[]).unwrap();
        let namespace = &specs.controllers[0].namespaces[0];
        assert_eq!(
            (namespace.nsid, namespace.block_size),
            (Some(7), Some(4096))
        );
        assert_eq!(namespace.volume.0, "mem://1M?iops=9");
        let twice = format!("{file}\nnsid = 7");
        let error = format!("{:#}", merge(&twice, &[]).unwrap_err());
        assert!(error.contains("\"nsid\" is given twice"), "{error}");
    }
}
