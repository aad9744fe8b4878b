//! Several hosts, each with a controller of one subsystem, all of them run by the test's thread.

use crate::common::*;
use controller::{ControllerConfig, InSubsystem, ReservationStore, Subsystem};
use nvme::cmd::reservation::{
    AcquireCdw10, Cptpl, Racqa, RegisterCdw10, ReleaseCdw10, ReportCdw11, Rrega, Rrela, Rtype,
};
use nvme::{Command, Completion, NvmOpcode, Status};
use reservations::{HostId, Reservations};
use std::sync::Arc;
use volume::Volume;

/// Data of reservation commands.
pub const KEYS: u64 = DATA + 0x10_0000;
/// What Reservation Report writes.
pub const REPORT: u64 = DATA + 0x20_0000;

pub fn steps(variable: &str, default: u64) -> u64 {
    let said = std::env::var(variable).ok();
    said.map_or(default, |said| said.parse().unwrap())
}

pub fn host_id(number: u8) -> HostId {
    HostId::extended([number; 16])
}

/// The configuration of controller `cntlid`, for the host of this number.
pub fn config(subsystem: &Arc<Subsystem>, cntlid: u16, host: u8) -> ControllerConfig {
    ControllerConfig {
        cntlid,
        io_queues: 4,
        max_in_flight: 64,
        subsystem: Some(InSubsystem {
            subsystem: subsystem.clone(),
            host: host_id(host),
        }),
        ..ControllerConfig::default()
    }
}

pub struct World {
    pub subsystem: Arc<Subsystem>,
    pub hosts: Vec<Host>,
}

impl World {
    /// A controller for each of `hosts`; namespace 1 is on `volume`.
    pub fn with(
        volume: &Arc<dyn Volume>,
        hosts: &[u8],
        store: Option<Box<dyn ReservationStore>>,
    ) -> World {
        World::with_more(std::slice::from_ref(volume), hosts, store)
    }

    /// The same with a namespace on each of `volumes`, from 1 on; `store` is that of namespace 1.
    pub fn with_more(
        volumes: &[Arc<dyn Volume>],
        hosts: &[u8],
        mut store: Option<Box<dyn ReservationStore>>,
    ) -> World {
        let subsystem = Subsystem::new();
        for (nsid, _) in (1..).zip(volumes) {
            let store = store.take();
            subsystem.add_namespace(nsid, Reservations::new(store.is_some()), store);
        }
        let made = hosts.iter().zip(1..).map(|(host, cntlid)| {
            let config = config(&subsystem, cntlid, *host);
            let all = (1..).zip(volumes);
            let all = all.map(|(nsid, volume)| ns(nsid, volume.clone(), 512));
            let mut h = Host::with(config, all.collect());
            h.enable();
            h.create_pair(1, 64);
            h
        });
        World {
            hosts: made.collect(),
            subsystem: subsystem.clone(),
        }
    }

    pub fn of(hosts: &[u8]) -> World {
        World::with(&mem(1 << 20), hosts, None)
    }

    /// A round of every controller's worker, each woken.
    pub fn round(&mut self) {
        for host in &mut self.hosts {
            host.c.drain_messages();
            host.round();
        }
    }

    pub fn rounds(&mut self, count: u32) {
        (0..count).for_each(|_| self.round());
    }

    pub fn begin(&mut self, who: usize, command: Command) -> u16 {
        self.hosts[who].submit(1, command)
    }

    pub fn end(&mut self, who: usize) -> Completion {
        for _ in 0..10_000 {
            self.round();
            if let Some(done) = self.hosts[who].reap(1) {
                return done;
            }
        }
        panic!("nothing happens");
    }

    pub fn command(&mut self, who: usize, command: Command) -> Status {
        let cid = self.begin(who, command);
        let done = self.end(who);
        assert_eq!(done.cid.get(), cid);
        done.status()
    }

    /// An admin command, while the others go on.
    pub fn admin(&mut self, who: usize, command: Command) -> Completion {
        let cid = self.hosts[who].submit(0, command);
        for _ in 0..10_000 {
            self.round();
            if let Some(done) = self.hosts[who].reap(0) {
                assert_eq!(done.cid.get(), cid);
                return done;
            }
        }
        panic!("nothing happens");
    }

    /// A reservation command with its two keys.
    pub fn reservation(
        &self,
        who: usize,
        opcode: NvmOpcode,
        cdw10: u32,
        keys: [u64; 2],
    ) -> Command {
        let mut command = Command::new(opcode.0, 0, 1);
        command.cdw10 = cdw10.into();
        let at = KEYS + u64::from(self.hosts[who].cid % 64) * 16;
        self.hosts[who].write(at, keys.map(u64::to_le_bytes).as_flattened());
        command.set_prps(at, 0);
        command
    }

    pub fn registering(&self, who: usize, action: Rrega, iekey: bool, keys: [u64; 2]) -> Command {
        let cdw10 = RegisterCdw10::new()
            .with_rrega(action)
            .with_iekey(iekey)
            .with_cptpl(Cptpl::NO_CHANGE);
        let opcode = NvmOpcode::RESERVATION_REGISTER;
        self.reservation(who, opcode, cdw10.into_bits(), keys)
    }

    pub fn register(&mut self, who: usize, key: u64) -> Status {
        let command = self.registering(who, Rrega::REGISTER, false, [0, key]);
        self.command(who, command)
    }

    pub fn acquiring(&self, who: usize, action: Racqa, rtype: Rtype, keys: [u64; 2]) -> Command {
        let cdw10 = AcquireCdw10::new().with_racqa(action).with_rtype(rtype);
        let opcode = NvmOpcode::RESERVATION_ACQUIRE;
        self.reservation(who, opcode, cdw10.into_bits(), keys)
    }

    pub fn acquire(&mut self, who: usize, rtype: Rtype, key: u64) -> Status {
        let command = self.acquiring(who, Racqa::ACQUIRE, rtype, [key, 0]);
        self.command(who, command)
    }

    pub fn releasing(&self, who: usize, action: Rrela, rtype: Rtype, key: u64) -> Command {
        let cdw10 = ReleaseCdw10::new().with_rrela(action).with_rtype(rtype);
        let opcode = NvmOpcode::RESERVATION_RELEASE;
        self.reservation(who, opcode, cdw10.into_bits(), [key, 0])
    }

    /// Reservation Report: so many bytes of it.
    pub fn report(&mut self, who: usize, extended: bool, bytes: u32) -> (Status, Vec<u8>) {
        let mut command = Command::new(NvmOpcode::RESERVATION_REPORT.0, 0, 1);
        command.cdw10 = (bytes / 4 - 1).into();
        command.cdw11 = ReportCdw11::new().with_eds(extended).into_bits().into();
        let host = &self.hosts[who];
        host.write(REPORT, &vec![0xee; bytes as usize]);
        host.prps(&mut command, REPORT, bytes.into(), PAGE);
        let status = self.command(who, command);
        (status, self.hosts[who].read(REPORT, bytes as usize))
    }

    pub fn rw(&self, who: usize, opcode: NvmOpcode, block: u64, byte: u8) -> Command {
        let at = DATA + (block % 64) * 512;
        if opcode == NvmOpcode::WRITE {
            self.hosts[who].write(at, &[byte; 512]);
        }
        self.hosts[who].rw(opcode, 1, block, 1, at)
    }

    pub fn write(&mut self, who: usize, block: u64, byte: u8) -> Status {
        let command = self.rw(who, NvmOpcode::WRITE, block, byte);
        self.command(who, command)
    }

    /// What a block has in all of its bytes.
    pub fn read(&mut self, who: usize, block: u64) -> Result<u8, Status> {
        let command = self.rw(who, NvmOpcode::READ, block, 0);
        let status = self.command(who, command);
        if !status.is_success() {
            return Err(status);
        }
        let data = self.hosts[who].read(DATA + (block % 64) * 512, 512);
        assert!(data.iter().all(|byte| *byte == data[0]), "half a write");
        Ok(data[0])
    }
}

pub const CONFLICT: Status = Status::RESERVATION_CONFLICT;
