//! Suite `rbd`: two images of one Ceph cluster, served by vnvme and by qemu-storage-daemon as
//! vhost-user-blk exports to the same client.
//!
//! The images should be created alike, because each server locks its image. The servers take turns,
//! slice by slice. No thread polls or is bound to a CPU: the cluster and librbd's threads probably
//! run on this machine, too.

use super::qsd::{QSD, Qsd, Start};
use super::scratch::Scratch;
use super::server::{Server, ServerConfig};
use super::{Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Context, Result, ensure};
use load::job::{Job, Rw};
use load::stats::Measured;
use load::virtio::VirtioTarget;
use std::path::Path;

const SUITE: &str = "rbd";
const DEPTHS: [u16; 2] = [1, 32];
const DIRECTIONS: [Rw; 2] = [Rw::RandRead, Rw::RandWrite];
/// Number of slices. Even, so that each side is first equally often.
const SLICES: u32 = 10;

/// Refuses words that select no cases.
pub fn check_only(only: &[String]) -> Result<()> {
    for word in only {
        ensure!(
            DEPTHS.iter().any(|depth| depth.to_string() == *word)
                || DIRECTIONS.iter().any(|rw| rw.word() == word),
            "--only {word}: the suite rbd has no such cases"
        );
    }
    Ok(())
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let mut outcome = SuiteResults::default();
    let [ours, theirs] = plan.rbd.as_slice() else {
        outcome.leave_out("the suite", "no two images are named (--rbd URL,URL)");
        return Ok(outcome);
    };
    let dir = Scratch::new()?;
    let socket = dir.path().join("qsd.sock");
    let program = plan.qsd.as_deref().unwrap_or(Path::new(QSD));
    let blockdevs = [blockdev(theirs)?];
    let start = Start {
        program,
        blockdevs: &blockdevs,
        socket: &socket,
        cpus: &[],
    };
    let serve = ServerConfig {
        volumes: Vec::new(),
        exports: vec![ours.clone()],
        ..ServerConfig::one("", false, &[])
    };
    let vnvme = Server::start(&plan.vnvme, &serve)?;
    let qsd = Qsd::start(&start)?;
    let sockets = [("vnvme", vnvme.export(0)), ("qsd", qsd.socket.clone())];
    let depths = DEPTHS.map(|depth| depth.to_string());
    let depths = plan.chosen(&depths.each_ref().map(String::as_str));
    let directions = plan.chosen(&DIRECTIONS.map(Rw::word));
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for rw in DIRECTIONS
            .into_iter()
            .filter(|rw| directions.contains(&rw.word()))
        {
            let chosen = |depth: &u16| depths.contains(&depth.to_string().as_str());
            for depth in DEPTHS.into_iter().filter(chosen) {
                let job = Job {
                    rw,
                    runtime: plan.runtime / SLICES,
                    ramp: plan.ramp / SLICES,
                    interrupt: true,
                    ..plan.job(depth, &[])
                };
                let mut totals = [(); 2].map(|()| Measured::default());
                for slice in 0..SLICES {
                    let order = if slice % 2 == 0 { [0, 1] } else { [1, 0] };
                    for side in order {
                        let target = VirtioTarget::open(&sockets[side].1, &job)?;
                        totals[side].append(&load::run(&target, &job, &mut ())?);
                    }
                }
                for ((word, _), total) in sockets.iter().zip(&totals) {
                    let (name, both) = (format!("{} {word}", rw.word()), total.both());
                    let (case, c) = (case(&name, depth), &mut outcome.collector);
                    c.add(case, "iops", "1/s", total.iops());
                    c.add(case, "p50_ns", "ns", both.percentile(50.0) as f64);
                    c.add(case, "p99_ns", "ns", both.percentile(99.0) as f64);
                }
                let [ours, theirs] = totals.map(|total| total.iops());
                let ratio = ours / theirs.max(1e-9);
                let case = case(rw.word(), depth);
                outcome.collector.add(case, "of_qsd", "ratio", ratio);
                eprintln!(
                    "  {}, depth {depth}: {ours:.0} by vnvme, {theirs:.0} by {QSD}: {ratio:.2}",
                    rw.word()
                );
            }
        }
    }
    Ok(outcome)
}

fn case(name: &str, depth: u16) -> Case<'_> {
    Case {
        suite: SUITE,
        case: name,
        depth: depth.into(),
        queues: 1,
    }
}

/// Converts the URL of an image to QEMU's block device options.
pub fn blockdev(url: &str) -> Result<String> {
    let (path, options) = url.split_once('?').unwrap_or((url, ""));
    let path = path.strip_prefix("rbd://").unwrap_or_default();
    let words: Vec<&str> = path.split('/').collect();
    let place = match words.as_slice() {
        [pool, image] => format!("pool={pool},image={image}"),
        [pool, namespace, image] => format!("pool={pool},namespace={namespace},image={image}"),
        _ => String::new(),
    };
    let plain = !place.is_empty() && !url.contains([',', '%', '@']);
    plain.then_some(()).with_context(|| {
        format!("--rbd {url}: it is rbd://POOL/IMAGE or rbd://POOL/NAMESPACE/IMAGE")
    })?;
    let mut text = format!("driver=rbd,node-name=q,cache.direct=on,discard=unmap,{place}");
    for option in options.split('&').filter_map(|one| one.split_once('=')) {
        match option {
            ("conf", path) => text.push_str(&format!(",conf={path}")),
            ("id", name) => text.push_str(&format!(",user={name}")),
            // Options that QEMU does not have.
            _ => {}
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rbd_url_becomes_qemu_blockdev_options() {
        let told = blockdev("rbd://p/n/i?conf=/c&ports=1-2&id=x").unwrap();
        assert!(told.ends_with("pool=p,namespace=n,image=i,conf=/c,user=x"));
        for wrong in ["p/i", "rbd://p", "rbd://p/i@s", "rbd://p/i?conf=/a,b"] {
            assert!(blockdev(wrong).is_err(), "{wrong}");
        }
    }
}
