//! Telemetry ("NVMe Base 2.1", 5.1.12.1.8 and 5.1.12.1.9): snapshots of the controller's state
//! for the analysis of failures. A snapshot is text, with one value per line.

use super::INVALID_FIELD;
use crate::control::Controller;
use crate::survival::state::{CapturedText, TelemetryState};
use crate::survival::wall_ms;
use nvme::Status;
use nvme::aen::{AsyncEvent, Notice};
use nvme::cmd::admin::GetLogPage;
use nvme::feature::AsyncEventConfig;
use nvme::log::{Lid, TELEMETRY_BLOCK, TelemetryHeader};
use std::fmt::Write;
use zerocopy::IntoBytes;

/// First line of a snapshot, with the version of the text format.
const FORM: &str = "vnvme telemetry, form 1";
/// Maximum size of a snapshot's text in bytes; the rest is cut off.
const MAX_TEXT_LEN: usize = 8 * TELEMETRY_BLOCK;
/// Bit Create Telemetry Host-Initiated Data of the Log Specific Parameter in Get Log Page.
const CREATE: u8 = 1;
/// Scope field of the telemetry log header: the snapshot covers this controller.
const SCOPE: u8 = 1;

/// Last telemetry snapshots: one that the host requested, and one that the controller made after a
/// failure.
#[derive(Default)]
pub(crate) struct Telemetry {
    host: Capture,
    own: Capture,
    /// Whether the host has yet to read the controller-initiated snapshot.
    available: bool,
}

#[derive(Default)]
struct Capture {
    /// Data generation number of the telemetry log: 0 before the first snapshot, then 1 to 255,
    /// then 1 again.
    generation: u8,
    text: String,
    reason: String,
}

impl Capture {
    fn next(&mut self, mut text: String, reason: &str) {
        shorten(&mut text, MAX_TEXT_LEN);
        let mut reason = reason.to_owned();
        shorten(&mut reason, size_of_val(&TelemetryHeader::default().reason));
        *self = Capture {
            generation: self.generation.checked_add(1).unwrap_or(1),
            text,
            reason,
        };
    }

    fn save(&self) -> CapturedText {
        CapturedText {
            generation: self.generation,
            text: self.text.clone(),
            reason: self.reason.clone(),
        }
    }

    fn restore(saved: &CapturedText) -> Self {
        let mut capture = Capture::default();
        capture.next(saved.text.clone(), &saved.reason);
        capture.generation = saved.generation;
        capture
    }
}

fn shorten(text: &mut String, most: usize) {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

impl Telemetry {
    pub fn save(&self) -> TelemetryState {
        TelemetryState {
            host: self.host.save(),
            own: self.own.save(),
            available: self.available,
        }
    }

    /// Restores the snapshots saved by [`Telemetry::save`], up to the maximum size.
    pub fn restore(saved: &TelemetryState) -> Self {
        Telemetry {
            host: Capture::restore(&saved.host),
            own: Capture::restore(&saved.own),
            available: saved.available,
        }
    }

    /// Returns a telemetry log page: the header, and the text in data area 1.
    pub(super) fn page(&self, lid: Lid) -> Vec<u8> {
        let (capture, ths, thdgn_tcs) = match lid {
            Lid::TELEMETRY_HOST => (&self.host, SCOPE, self.host.generation),
            _ => (&self.own, 0, SCOPE),
        };
        let blocks = capture.text.len().div_ceil(TELEMETRY_BLOCK);
        let last = blocks as u16;
        let mut header = TelemetryHeader {
            lid,
            da1lb: last.into(),
            da2lb: last.into(),
            da3lb: last.into(),
            ths,
            thdgn_tcs,
            tcda: self.available.into(),
            tcdgn: self.own.generation,
            ..Default::default()
        };
        let reason = header.reason.iter_mut().zip(capture.reason.bytes());
        reason.for_each(|(place, byte)| *place = byte);
        let mut page = header.as_bytes().to_vec();
        page.extend_from_slice(capture.text.as_bytes());
        page.resize((1 + blocks) * TELEMETRY_BLOCK, 0);
        page
    }
}

impl Controller {
    /// Prepares a read of a telemetry page. The length must be a multiple of the block size, and
    /// the host may request a new snapshot.
    pub(super) fn before_telemetry(&mut self, get: &GetLogPage) -> Result<bool, Status> {
        let block = TELEMETRY_BLOCK as u64;
        if !get.bytes().is_multiple_of(block) || !get.lpo.is_multiple_of(block) {
            return Err(INVALID_FIELD);
        }
        if get.lid == Lid::TELEMETRY_HOST && get.lsp & CREATE != 0 {
            let text = self.snapshot();
            self.admin
                .telemetry
                .host
                .next(text, "requested by the host");
            self.touch();
        }
        Ok(true)
    }

    /// Handles the host's read of the controller-initiated snapshot, after which the next failure
    /// makes a new one.
    pub(super) fn telemetry_read(&mut self) {
        self.admin.telemetry.available = false;
        self.touch();
    }

    /// Makes a snapshot after a failure, unless the host has yet to read the last one.
    pub(crate) fn capture(&mut self, reason: &str) {
        if self.admin.telemetry.available {
            return;
        }
        let text = self.snapshot();
        self.admin.telemetry.own.next(text, reason);
        self.admin.telemetry.available = true;
        self.touch();
        if AsyncEventConfig::from_bits(self.admin.features.event_config).tln() {
            let (notice, lid) = (Notice::TELEMETRY_LOG_CHANGED, Lid::TELEMETRY_CONTROLLER);
            self.notify(AsyncEvent::notice(notice, lid));
        }
    }

    /// Returns the present state of the controller as text.
    fn snapshot(&self) -> String {
        let stats = &self.engine.stats;
        let mut text = String::with_capacity(MAX_TEXT_LEN);
        let mut line = |name: &str, value: &dyn std::fmt::Display| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{name} = {value}");
        };
        line("form", &FORM);
        line("version", &self.config.firmware);
        line("time_ms", &wall_ms());
        line(
            "power_on_s",
            &self.admin.logs.powered_on().elapsed().as_secs(),
        );
        let (cc, csts) = (self.cc.into_bits(), self.csts_bits());
        line("cc", &format_args!("{cc:#x}"));
        line("csts", &format_args!("{csts:#x}"));
        line("shadow_doorbells", &self.engine.queues.shadowed());
        for (name, counter) in [
            ("power_cycles", &stats.power_cycles),
            ("unsafe_shutdowns", &stats.unsafe_shutdowns),
            ("resets", &stats.resets),
            ("migrations", &stats.migrations),
            ("media_errors", &stats.media_errors),
            ("error_log_entries", &stats.error_log_entries),
        ] {
            line(name, &counter.get());
        }
        line("reads", &stats.host_reads());
        line("writes", &stats.host_writes());
        line("bytes_read", &stats.bytes_read());
        line("bytes_written", &stats.bytes_written());
        line("in_flight", &self.engine.slots.in_use());
        line("events_parked", &self.admin.events.parked());
        for cq in self.queues.cqs() {
            let (vector, size) = (cq.vector.map_or(-1, i32::from), cq.size);
            line(
                &format!("cq.{}", cq.qid),
                &format_args!("size {size}, vector {vector}"),
            );
        }
        for sq in self.queues.sqs() {
            let counters = stats.queues.get(usize::from(sq.qid));
            let (fetched, posted) =
                counters.map_or((0, 0), |q| (q.commands.get(), q.completions.get()));
            let (cqid, size) = (sq.cqid, sq.size);
            line(
                &format!("sq.{}", sq.qid),
                &format_args!("cq {cqid}, size {size}, fetched {fetched}, posted {posted}"),
            );
        }
        for ns in self.active() {
            let (blocks, size) = (ns.blocks, 1u64 << ns.shift);
            line(
                &format!("namespace.{}", ns.config.nsid),
                &format_args!(
                    "blocks {blocks} of {size} bytes, read-only {}",
                    ns.read_only
                ),
            );
            let Some(state) = ns.config.placement.as_deref() else {
                continue;
            };
            let placement = state.get();
            for handle in 0..placement.geometry().handles {
                let (bytes, units) = (placement.bytes(handle), placement.units(handle));
                line(
                    &format!("namespace.{}.handle.{handle}", ns.config.nsid),
                    &format_args!("{bytes} bytes, {units} reclaim units before this one"),
                );
            }
        }
        text
    }
}
