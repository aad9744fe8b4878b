//! Linux's NVMe/TCP target in a guest. Its ports are reached from here by QEMU's user network.

use std::time::Duration;

use anyhow::{Context, Result};
use harness::Guest;

use super::nbd::port;

/// The subsystem's name.
pub const NQN: &str = "nqn.2014-08.org.vnvme:nvmet";

/// NQN of a subsystem that requires hosts to authenticate.
pub const PROVEN_NQN: &str = "nqn.2014-08.org.vnvme:nvmet-auth";

/// A guest that serves one namespace by two ports.
pub struct Nvmet {
    guest: Guest,
    ports: [u16; 2],
}

impl Nvmet {
    /// One with a namespace of `mib` MiB in the guest's memory.
    pub fn start(name: &str, mib: u32, limit: Duration) -> Result<Self> {
        let ports = [port()?, port()?];
        // Each port is behind a card of its own. They can be reached, and reach nothing.
        let card = |number: usize| {
            let (port, net) = (ports[number - 1], format!("10.0.{number}"));
            let forward = format!("hostfwd=tcp:127.0.0.1:{port}-{net}.15:442{number}");
            let mac = format!("52:54:00:00:00:0{number}");
            [
                "-netdev".to_owned(),
                format!("user,id=net{number},restrict=on,net={net}.0/24,{forward}"),
                "-device".to_owned(),
                format!("virtio-net-pci,id=card{number},netdev=net{number},mac={mac},romfile="),
            ]
        };
        let guest = Guest::builder(name)
            .cpus(1)
            .memory_mib(256 + mib)
            .limit(limit)
            .qemu_args(card(1).into_iter().chain(card(2)))
            .boot()?;
        guest
            .run(&format!(
                "set -e
                 modprobe -a virtio_net nvmet nvmet-tcp
                 [ -d /sys/kernel/config/nvmet ] || mount -t configfs c /sys/kernel/config
                 ip link set lo up
                 for p in 1 2; do
                     d=$(basename $(dirname $(grep -l 52:54:00:00:00:0$p /sys/class/net/*/address)))
                     ip link set $d up; ip addr add 10.0.$p.15/24 dev $d
                 done
                 C=/sys/kernel/config/nvmet; S=$C/subsystems/{NQN}
                 mkdir $S; echo 1 >$S/attr_allow_any_host; echo SN1 >$S/attr_serial
                 truncate -s {mib}M /tmp/disk
                 mkdir $S/namespaces/1; echo /tmp/disk >$S/namespaces/1/device_path
                 echo 1 >$S/namespaces/1/enable
                 for p in 1 2; do
                     P=$C/ports/$p; mkdir $P
                     echo tcp >$P/addr_trtype; echo ipv4 >$P/addr_adrfam
                     echo 0.0.0.0 >$P/addr_traddr; echo 442$p >$P/addr_trsvcid
                     ln -s $S $P/subsystems/t
                 done"
            ))
            .context("nvmet")?;
        Ok(Self { guest, ports })
    }

    /// The volume's URL, by both ports.
    pub fn url(&self) -> String {
        let [one, two] = self.ports;
        format!("nvme+tcp://127.0.0.1:{one},127.0.0.1:{two}/{NQN}/1")
    }

    /// The first port.
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// A port closes, with all of its connections.
    pub fn close(&self, number: usize) -> Result<()> {
        let script = format!("rm /sys/kernel/config/nvmet/ports/{number}/subsystems/t");
        self.guest.run(&script).map(drop)
    }

    /// It listens again.
    pub fn open(&self, number: usize) -> Result<()> {
        let config = "/sys/kernel/config/nvmet";
        let script =
            format!("ln -s {config}/subsystems/{NQN} {config}/ports/{number}/subsystems/t");
        self.guest.run(&script).map(drop)
    }

    /// The cable of a port's card is pulled, or is there again. While it is not, nothing is
    /// answered, and no connection ends.
    pub fn set_cable(&self, number: usize, up: bool) -> Result<()> {
        let card = serde_json::json!({ "name": format!("card{number}"), "up": up });
        self.guest.qmp("set_link", card).map(drop)
    }

    /// How a port reaches the namespace, as the target says it.
    pub fn set_state(&self, number: usize, state: &str) -> Result<()> {
        let group = format!("/sys/kernel/config/nvmet/ports/{number}/ana_groups/1/ana_state");
        self.guest.run(&format!("echo {state} >{group}")).map(drop)
    }

    /// The namespace has another size, in MiB.
    pub fn resize(&self, mib: u32) -> Result<()> {
        let namespace = format!("/sys/kernel/config/nvmet/subsystems/{NQN}/namespaces/1");
        let script = format!("truncate -s {mib}M /tmp/disk; echo 1 >{namespace}/revalidate_size");
        self.guest.run(&script).map(drop)
    }

    /// Adds another subsystem to the first port. `host` has to authenticate with `secret`, and the
    /// subsystem authenticates itself to the host with `own`.
    pub fn add_proven(&self, host: &str, secret: &str, own: &str) -> Result<()> {
        self.guest
            .run(&format!(
                "set -e
                 C=/sys/kernel/config/nvmet; S=$C/subsystems/{PROVEN_NQN}; H=$C/hosts/{host}
                 mkdir $S; truncate -s 16M /tmp/proven
                 mkdir $S/namespaces/1; echo /tmp/proven >$S/namespaces/1/device_path
                 echo 1 >$S/namespaces/1/enable
                 mkdir $H; echo '{secret}' >$H/dhchap_key; echo '{own}' >$H/dhchap_ctrl_key
                 echo 0 >$S/attr_allow_any_host
                 ln -s $H $S/allowed_hosts/{host}
                 ln -s $S $C/ports/1/subsystems/proven"
            ))
            .map(drop)
    }

    /// By which hash and group that is done.
    pub fn set_proof(&self, host: &str, hash: &str, group: &str) -> Result<()> {
        let host = format!("/sys/kernel/config/nvmet/hosts/{host}");
        let script = format!(
            "set -e; echo 'hmac({hash})' >{host}/dhchap_hash; echo {group} >{host}/dhchap_dhgroup"
        );
        self.guest.run(&script).map(drop)
    }

    /// The machine that it is in.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }
}
