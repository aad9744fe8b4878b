//! Neighbours that are processes: each drives its disk itself, over vfio-user.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use driver::vfio_user::VfioUser;
use driver::{Device, Op, QueueOptions, Request};

use super::{BLOCK, LOAD, NEIGHBOUR, REQUEST_INTERVAL, REQUEST_TIMEOUT, SECTORS};

/// Starts a load on a neighbour's disk for `seconds`.
pub fn start(dir: &Path, name: &str, seconds: usize) -> Result<Child> {
    let real_time = Command::new("chrt").args(["-f", "5", "true"]).status();
    let own = std::env::current_exe()?;
    let mut command = if real_time.is_ok_and(|status| status.success()) {
        let mut command = Command::new("chrt");
        command.args(["-f", "5"]).arg(own);
        command
    } else {
        Command::new(own)
    };
    let command = command.arg(LOAD).arg(dir.join(name));
    let command = command.arg(seconds.to_string()).stdout(Stdio::piped());
    command.spawn().context("a load")
}

/// The times that a load has printed, in microseconds. An error if it read something wrong.
pub fn times(load: Child) -> Result<Vec<f64>> {
    let output = load.wait_with_output()?;
    ensure!(output.status.success(), "a load failed: {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let times = text.lines().map(|line| Ok(line.parse::<f64>()? / 1e3));
    times.collect()
}

/// A load: prints the time of each request in nanoseconds.
pub fn run(socket: &Path, seconds: u64) -> Result<()> {
    let transport = VfioUser::connect(socket, REQUEST_TIMEOUT)?;
    let device = Device::open(transport, driver::Options::default())?;
    let options = QueueOptions {
        poll_window: Duration::ZERO,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(1, options)?;
    let mut buffer = device.allocate(BLOCK)?;
    let mut found = [0; BLOCK];
    let blocks = NEIGHBOUR / BLOCK as u64;
    let mut written = vec![None; usize::try_from(blocks)?];
    let mut times = Vec::new();
    let mut random = u64::from(std::process::id());
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let block = (random >> 33) % blocks;
        let known = written
            .get_mut(usize::try_from(block)?)
            .context("a block")?;
        // Data that is read was written last.
        let op = match (&known, random >> 63) {
            (Some(_), 0) => Op::Read,
            _ => {
                *known = Some(random);
                buffer.write(0, &random.to_le_bytes().repeat(BLOCK / 8))?;
                Op::Write { fua: false }
            }
        };
        let is_read = matches!(op, Op::Read);
        let request = Request {
            op,
            lba: block * SECTORS,
            blocks: SECTORS,
            buffer: Some(buffer),
            user_data: 0,
        };
        let sent = Instant::now();
        let done = queue.execute(request).map_err(|refused| refused.why)?;
        let took = sent.elapsed();
        times.push(took.as_nanos().to_string());
        done.result?;
        buffer = done.buffer.context("the buffer is gone")?;
        if is_read {
            buffer.read(0, &mut found)?;
            let right = known.unwrap_or(0).to_le_bytes().repeat(BLOCK / 8);
            ensure!(right == found, "block {block} is another one");
        }
        std::thread::sleep(REQUEST_INTERVAL.saturating_sub(took));
    }
    println!("{}", times.join("\n"));
    Ok(())
}
