//! `vnvme stats`.

use super::table::size;
use super::target::{DaemonTarget, MaybeDisk};
use super::{devices, limits, on_error};
use anyhow::{Result, bail};
use clap::Args;
use control::api::{
    ControllerCounters, PathCounters, RingCounters, SocketCounters, Stats, UblkCounters,
    VhostBlkCounters, WorkerCounters,
};
use output::{OutputError, outln};

/// Options of `vnvme stats`.
#[derive(Args)]
pub struct StatsArgs {
    #[command(flatten)]
    disk: MaybeDisk,
    #[command(flatten)]
    target: DaemonTarget,
}

impl StatsArgs {
    /// Prints counters of everything, or of one disk.
    pub fn run(self) -> Result<()> {
        let mut stats = self.target.client()?.stats()?;
        if let Some(name) = &self.disk.name {
            stats = of(stats, name);
            let Stats { ublk, measured, .. } = &stats;
            if measured.disks.is_empty() && ublk.is_empty() {
                bail!("no disk is called \"{name}\"; vnvme list shows the names");
            }
        }
        self.target.print(&stats, |stats| Ok(print(stats)?))
    }
}

/// Keeps only the counters of one disk.
fn of(mut stats: Stats, name: &str) -> Stats {
    stats.controllers.retain(|one| one.name == name);
    stats.vhost_user_blk.retain(|one| one.name == name);
    stats.ublk.retain(|one| one.name == name);
    stats.measured.disks.retain(|one| one.name == name);
    stats.volumes.retain(|one| one.disk == name);
    stats.on_error.retain(|one| one.disk == name);
    Stats {
        devices: Vec::new(),
        rings: Vec::new(),
        workers: Vec::new(),
        ..stats
    }
}

/// For people, each kind sorted by names.
fn print(stats: &Stats) -> Result<(), OutputError> {
    let mut ublk: Vec<_> = stats.ublk.iter().collect();
    ublk.sort_by(|one, other| one.name.cmp(&other.name));
    ublk.into_iter().try_for_each(print_ublk)?;
    let mut controllers: Vec<_> = stats.controllers.iter().collect();
    controllers.sort_by(|one, other| one.name.cmp(&other.name));
    controllers.into_iter().try_for_each(print_controller)?;
    let mut exports: Vec<_> = stats.vhost_user_blk.iter().collect();
    exports.sort_by(|one, other| one.name.cmp(&other.name));
    exports.into_iter().try_for_each(print_vhost_blk)?;
    stats.measured.disks.iter().try_for_each(print_counters)?;
    stats.volumes.iter().try_for_each(limits::print)?;
    stats.on_error.iter().try_for_each(on_error::print)?;
    stats.devices.iter().try_for_each(devices::print)?;
    stats.rings.iter().try_for_each(print_ring)?;
    stats.workers.iter().try_for_each(print_worker)
}

/// Prints counters of a socket that refused or delayed clients; nothing for others.
fn print_socket(clients: &SocketCounters) -> Result<(), OutputError> {
    if clients.delayed + clients.failed > 0 {
        outln!(
            "  connections {}   made to wait {}   failed {}",
            clients.accepted,
            clients.delayed,
            clients.failed
        );
    }
    Ok(())
}

/// Prints the counters that only disks of one kind have.
fn print_counters(disk: &metrics::Disk) -> Result<(), OutputError> {
    if disk.counters.is_empty() {
        return Ok(());
    }
    outln!("{}  ({}, {})", disk.name, disk.kind, disk.address);
    let all = disk.counters.iter();
    let all: Vec<String> = all.map(|(name, value)| format!("{name} {value}")).collect();
    outln!("  {}", all.join("   "));
    Ok(())
}

fn print_controller(c: &ControllerCounters) -> Result<(), OutputError> {
    outln!("{}  ({})", c.name, c.socket);
    print_socket(&c.clients)?;
    outln!(
        "  reads {} ({})   writes {} ({})   errors {}   resets {}",
        c.host_reads,
        size(c.bytes_read),
        c.host_writes,
        size(c.bytes_written),
        c.errors,
        c.resets
    );
    outln!(
        "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9} {:>7}",
        "queue",
        "commands",
        "completions",
        "mmio",
        "shadow",
        "arms",
        "interrupts",
        "mmio/cmd",
        "worker"
    );
    for q in &c.queues {
        let per_command = q.mmio_doorbells as f64 / q.commands.max(1) as f64;
        outln!(
            "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9.3} {:>7}",
            q.qid,
            q.commands,
            q.completions,
            q.mmio_doorbells,
            q.shadow_doorbells,
            q.arms,
            q.interrupts,
            per_command,
            q.worker
        );
    }
    for direct in &c.direct {
        print_direct(direct)?;
    }
    Ok(())
}

fn print_direct(direct: &PathCounters) -> Result<(), OutputError> {
    let path = direct.path.name();
    outln!("  namespace {}: {path} path", direct.nsid);
    for lane in &direct.lanes {
        outln!(
            "    commands {}   refused {}   split {}   copied {} ({} bytes)",
            lane.commands,
            lane.refused,
            lane.split,
            lane.bounced,
            lane.bounced_bytes
        );
        for (what, cycles) in [("translated", lane.translate), ("completed", lane.complete)] {
            outln!(
                "    {what:<11} avg cycles: {:.1}   avg time(usec): {:.3}   p50 {}   p99 {}   \
                 p99.9 {}   total: {}",
                cycles.average,
                cycles.average_ns / 1000.0,
                cycles.p50,
                cycles.p99,
                cycles.p999,
                cycles.count
            );
        }
    }
    Ok(())
}

fn print_vhost_blk(one: &VhostBlkCounters) -> Result<(), OutputError> {
    outln!("{}  (vhost-user-blk, {})", one.name, one.socket);
    outln!(
        "  {}   connections {}   resubmitted {}",
        if one.connected {
            "connected"
        } else {
            "not connected"
        },
        one.connections,
        one.resubmitted
    );
    print_socket(&one.clients)?;
    outln!(
        "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9}",
        "queue",
        "requests",
        "read",
        "written",
        "errors",
        "kicks",
        "arms",
        "notifications",
        "kicks/req"
    );
    for q in &one.queues {
        outln!(
            "  {:>5} {:>12} {:>10} {:>10} {:>8} {:>10} {:>10} {:>13} {:>9.3}",
            q.queue,
            q.requests,
            size(q.bytes_read),
            size(q.bytes_written),
            q.errors,
            q.kicks,
            q.arms,
            q.notifications,
            q.kicks as f64 / q.requests.max(1) as f64
        );
    }
    Ok(())
}

fn print_ublk(one: &UblkCounters) -> Result<(), OutputError> {
    outln!("{}  ({})", one.device, one.volume);
    outln!(
        "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
        "queue",
        "reads",
        "read",
        "writes",
        "written",
        "flushes",
        "discards",
        "errors",
        "sleeps"
    );
    for (i, q) in one.queues.iter().enumerate() {
        outln!(
            "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
            i,
            q.reads,
            size(q.bytes_read),
            q.writes,
            size(q.bytes_written),
            q.flushes,
            q.discards,
            q.errors,
            q.sleeps
        );
    }
    Ok(())
}

fn print_ring(one: &RingCounters) -> Result<(), OutputError> {
    outln!(
        "{} io_uring: requests {}   batches {} ({:.1} operations each)   system calls {} ({:.2} \
         for each batch)   \
         on pinned memory {}   bounced {}",
        one.thread,
        one.requests,
        one.batches,
        one.operations as f64 / one.batches.max(1) as f64,
        one.system_calls,
        one.system_calls as f64 / one.batches.max(1) as f64,
        one.fixed,
        one.bounced,
    );
    Ok(())
}

fn print_worker(one: &WorkerCounters) -> Result<(), OutputError> {
    if one.stalls > 0 {
        let now = match &one.doing {
            Some(doing) => format!("   stands still for {} ms: {doing}", one.stalled_ms),
            None => String::new(),
        };
        outln!(
            "{}: stalls {}   longest {} ms{now}",
            one.thread,
            one.stalls,
            one.longest_stall_ms
        );
    }
    Ok(())
}
