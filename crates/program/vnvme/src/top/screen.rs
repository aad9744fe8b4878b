//! Screen contents as lines of text, which depend only on the rates, the user's choices and the
//! size of the screen.

use super::rates::{DiskRates, NamespaceRates, Rates};
use super::recent::RecentTimes;
use probes::{IoKind, TIMED_EVERY};
use std::cmp::Ordering;

/// Sort key of the disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Operations per second
    #[default]
    Iops,
    /// Bytes per second, both ways
    Bandwidth,
    /// 99th percentile of the time of reads and writes
    P99,
    /// Commands in flight
    Depth,
    /// Name
    Name,
}

impl Sort {
    const ALL: [Self; 5] = [
        Self::Iops,
        Self::Bandwidth,
        Self::P99,
        Self::Depth,
        Self::Name,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::Bandwidth => "bandwidth",
            Self::P99 => "p99",
            Self::Depth => "depth",
            Self::Name => "name",
        }
    }

    fn next(self) -> Self {
        let mut all = Self::ALL.into_iter().cycle().skip_while(|s| *s != self);
        all.nth(1).unwrap_or_default()
    }

    fn compare(self, a: &DiskRates, b: &DiskRates) -> Ordering {
        let largest = |a: f64, b: f64| b.total_cmp(&a);
        let p99 = |disk: &DiskRates| disk.latency.times.percentile(0.99);
        let first = match self {
            Self::Iops => largest(a.operations(), b.operations()),
            Self::Bandwidth => largest(a.read() + a.written(), b.read() + b.written()),
            Self::P99 => p99(b).cmp(&p99(a)),
            Self::Depth => b.in_flight.cmp(&a.in_flight),
            Self::Name => Ordering::Equal,
        };
        first.then_with(|| a.name.cmp(&b.name))
    }
}

/// State of the display that the user controls: sorting, filter and selection.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    sort: Sort,
    /// Text that the name of a disk must contain for the disk to be shown.
    filter: String,
    /// Whether the user is typing the filter.
    typing: bool,
    /// Name of the selected disk.
    selected: Option<String>,
    /// Whether only the selected disk is shown, with details.
    opened: bool,
}

/// Key that the user has pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
}

/// Minimum width of the column of names, and the width of the whole table with it.
const NAME_WIDTH: usize = 16;
const TABLE_WIDTH: usize = 80;
/// Maximum number of instances without an answer that are shown with the reason.
const MAX_UNANSWERED: usize = 3;

/// Maximum length of the filter text in characters.
const FILTER_MAX: usize = 64;

impl Choices {
    /// Creates the state of the display at the start, from the command line.
    pub fn new(sort: Sort, filter: String) -> Self {
        Self {
            sort,
            filter,
            ..Self::default()
        }
    }

    /// Handles a pressed key. Returns `true` if it ends the program.
    pub fn press(&mut self, key: Key, rates: &Rates) -> bool {
        if self.typing {
            match key {
                Key::Char('\u{3}') => return true,
                Key::Char(c) if !c.is_control() && self.filter.len() < FILTER_MAX => {
                    self.filter.push(c);
                }
                Key::Backspace => drop(self.filter.pop()),
                Key::Escape => {
                    self.filter.clear();
                    self.typing = false;
                }
                Key::Enter => self.typing = false,
                _ => {}
            }
            return false;
        }
        match key {
            Key::Char('q' | '\u{3}') => return true,
            Key::Char('s') => self.sort = self.sort.next(),
            Key::Char('/') => (self.typing, self.opened) = (true, false),
            Key::Up | Key::Char('k') => self.step(rates, false),
            Key::Down | Key::Char('j') => self.step(rates, true),
            Key::Enter => {
                if self.selected.is_none() {
                    self.step(rates, true);
                }
                self.opened = self.selected.is_some();
            }
            Key::Escape | Key::Backspace => {
                if !self.opened {
                    self.filter.clear();
                }
                self.opened = false;
            }
            Key::Char(_) => {}
        }
        false
    }

    /// Returns the disks to show, in the selected order.
    fn shown<'a>(&self, rates: &'a Rates) -> Vec<&'a DiskRates> {
        let mut disks: Vec<&DiskRates> = rates.disks.iter().collect();
        disks.retain(|disk| disk.name.contains(&self.filter));
        disks.sort_by(|a, b| self.sort.compare(a, b));
        disks
    }

    /// Moves the selection one line up or down.
    fn step(&mut self, rates: &Rates, down: bool) {
        let disks = self.shown(rates);
        let is_selected = |disk: &&DiskRates| Some(&disk.name) == self.selected.as_ref();
        let at = match (disks.iter().position(is_selected), down) {
            (None, _) => 0,
            (Some(at), true) => (at + 1).min(disks.len().saturating_sub(1)),
            (Some(at), false) => at.saturating_sub(1),
        };
        self.selected = disks.get(at).map(|disk| disk.name.clone());
    }
}

/// Line of text on the screen, and whether it is selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub cursor: bool,
}

impl From<String> for Line {
    fn from(text: String) -> Self {
        Self {
            text,
            cursor: false,
        }
    }
}

/// Formats the screen, with at most `width` columns and `height` lines (`None`: no limit).
pub fn screen(rates: &Rates, choices: &Choices, width: usize, height: Option<usize>) -> Vec<Line> {
    let opened = choices.opened.then(|| {
        let of = |disk: &&DiskRates| Some(&disk.name) == choices.selected.as_ref();
        rates.disks.iter().find(of)
    });
    let mut lines = head(rates, choices);
    let foot = match opened.flatten() {
        Some(disk) => {
            lines.extend(disk_lines(disk));
            "q quit   esc back"
        }
        None => {
            let room = height.map(|height| height.saturating_sub(lines.len() + 2));
            lines.extend(disks_lines(rates, choices, width, room));
            "q quit   s sort   / filter   j/k or arrows select   enter queues"
        }
    };
    if let Some(height) = height {
        lines.truncate(height.saturating_sub(1));
        lines.push(foot.to_owned().into());
        let cut = lines.len().saturating_sub(height);
        lines.drain(..cut);
    }
    for line in &mut lines {
        line.text = fit(&line.text, width).trim_end().to_owned();
    }
    lines
}

fn head(rates: &Rates, choices: &Choices) -> Vec<Line> {
    // A sum of nothing would be -0.
    let sum =
        |of: fn(&DiskRates) -> f64| rates.disks.iter().map(of).fold(0.0, |all, one| all + one);
    let memory = rates.resident.map_or_else(String::new, |bytes| {
        format!("   memory {}", bytes_of(bytes as f64))
    });
    let filter = match (choices.typing, choices.filter.is_empty()) {
        (true, _) => format!("   filter: {}_", choices.filter),
        (false, false) => format!("   filter: {}", choices.filter),
        (false, true) => String::new(),
    };
    let workers = rates.workers.iter().map(|worker| {
        let percent = |part: f64| format!("{:.0}", part * 100.0);
        format!(
            "{}: {}/{}/{}",
            worker.name,
            percent(worker.busy),
            percent(worker.polling),
            percent(worker.asleep)
        )
    });
    let workers: Vec<String> = workers.collect();
    let longer = if rates.disks.iter().any(|disk| disk.latency.is_longer) {
        format!("   * of a longer time: one of {TIMED_EVERY} commands is timed")
    } else {
        String::new()
    };
    let mut lines = vec![
        format!(
            "{} {}   {} IOPS   read {}/s   write {}/s   cpu {:.0}%{memory}",
            rates.disks.len(),
            if rates.disks.len() == 1 {
                "disk"
            } else {
                "disks"
            },
            count_of(sum(DiskRates::operations)),
            bytes_of(sum(DiskRates::read)),
            bytes_of(sum(DiskRates::written)),
            rates.cpu * 100.0,
        )
        .into(),
        format!("workers, % busy/polling/asleep   {}", workers.join("   ")).into(),
        format!("sorted by {}{filter}{longer}", choices.sort.name()).into(),
    ];
    let trouble = rates.disks.iter().filter_map(|disk| {
        let name = clean(&disk.name);
        match (disk.held, disk.failed) {
            (0, 0.0) => None,
            (0, failed) => Some(format!("{name} FAILS: {} errors/s", count_of(failed))),
            (held, _) => Some(format!("{name} STOPPED: {held} wait for vnvme resume")),
        }
    });
    let trouble: Vec<String> = trouble.collect();
    if !trouble.is_empty() {
        lines.push(trouble.join("   ").into());
    }
    let shown = rates.unanswered.iter().take(MAX_UNANSWERED);
    lines.extend(shown.cloned().map(Line::from));
    let more = rates.unanswered.len().saturating_sub(MAX_UNANSWERED);
    if more > 0 {
        lines.push(format!("{more} more instances do not answer").into());
    }
    lines
}

/// Returns the width of the column of names: longer names get the columns that a wide screen has.
fn name_width(rates: &Rates, width: usize) -> usize {
    let names = rates.disks.iter();
    let names = names.map(|disk| clean(&disk.name).chars().map(columns).sum());
    let longest: usize = names.max().unwrap_or(0);
    longest.clamp(NAME_WIDTH, NAME_WIDTH + width.saturating_sub(TABLE_WIDTH))
}

fn disks_lines(rates: &Rates, choices: &Choices, width: usize, room: Option<usize>) -> Vec<Line> {
    let name_width = name_width(rates, width);
    let columns = |cells: [&str; 10]| {
        let [name, kind, iops, read, write, p50, p99, depth, wait, worker] = cells;
        let name = fit(name, name_width);
        format!(
            "{name} {kind:<5} {iops:>7} {read:>8} {write:>8} {p50:>7} {p99:>7} {depth:>6} \
             {wait:>5} {worker:>2}"
        )
    };
    let mut lines = vec![
        columns([
            "DISK", "KIND", "IOPS", "READ/s", "WRITE/s", "P50", "P99", "DEPTH", "WAIT", "W",
        ])
        .into(),
    ];
    let disks = choices.shown(rates);
    let is_selected = |disk: &DiskRates| Some(&disk.name) == choices.selected.as_ref();
    let at = disks.iter().position(|disk| is_selected(disk)).unwrap_or(0);
    let room = room.unwrap_or(usize::MAX).max(1);
    let first = (at + 1).saturating_sub(room);
    for disk in disks.iter().skip(first).take(room) {
        let percentile = |part| percentile(&disk.latency, disk.operations(), part);
        let worker = match &*disk.workers {
            [] => "-".into(),
            [one] => one.to_string(),
            several => format!("{}w", several.len()),
        };
        let wait = match disk.throttled {
            0.0 => "-".into(),
            part => format!("{:.0}%", part * 100.0),
        };
        let depth = match disk.depth {
            Some(depth) => format!("{depth:.1}"),
            None => disk.in_flight.to_string(),
        };
        lines.push(Line {
            text: columns([
                &disk.name,
                short(&disk.kind),
                &count_of(disk.operations()),
                &bytes_of(disk.read()),
                &bytes_of(disk.written()),
                &percentile(0.5),
                &percentile(0.99),
                &depth,
                &wait,
                &worker,
            ]),
            cursor: is_selected(disk),
        });
    }
    if disks.is_empty() && !rates.disks.is_empty() {
        lines.push("no disk's name has this".to_owned().into());
    }
    lines
}

fn short(kind: &str) -> &str {
    match kind {
        "controller" => "ctrl",
        "vhost-user-blk" => "vhost",
        "nvme-tcp" => "tcp",
        kind => kind,
    }
}

fn disk_lines(disk: &DiskRates) -> Vec<Line> {
    let attached = if disk.connected {
        "attached"
    } else {
        "no client is attached"
    };
    let name = clean(&disk.name);
    let mut lines: Vec<Line> = vec![
        format!(
            "{name}   {} {}   {attached}",
            disk.kind,
            clean(&disk.address)
        )
        .into(),
        format!(
            "in flight {}   errors {}/s   waiting for limits {:.0}%",
            disk.in_flight,
            count_of(disk.errors()),
            disk.throttled * 100.0
        )
        .into(),
    ];
    for namespace in &disk.namespaces {
        lines.push(String::new().into());
        lines.extend(namespace_lines(namespace));
    }
    lines.push(String::new().into());
    lines.push(
        format!(
            "{:>5} {:>6} {:>10} {:>9} {:>11} {:>14} {:>8}",
            "QUEUE",
            "WORKER",
            "COMMANDS/s",
            "IN FLIGHT",
            "MMIO/COMMAND",
            "INTERRUPTS/CMD",
            "ARMS/s"
        )
        .into(),
    );
    for queue in &disk.queues {
        let worker = queue.worker.map_or("-".into(), |worker| worker.to_string());
        lines.push(
            format!(
                "{:>5} {:>6} {:>10} {:>9} {:>12.3} {:>14.3} {:>8}",
                queue.id,
                worker,
                count_of(queue.commands),
                queue.in_flight,
                queue.mmio,
                queue.interrupts,
                count_of(queue.arms)
            )
            .into(),
        );
    }
    lines
}

fn namespace_lines(namespace: &NamespaceRates) -> Vec<Line> {
    let path = match namespace.direct {
        Some(true) => "   direct path",
        Some(false) => "   generic path",
        None => "",
    };
    let volume = clean(&namespace.volume);
    let mut lines: Vec<Line> = vec![
        format!("namespace {}   {volume}{path}", namespace.nsid).into(),
        format!(
            "{:<7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8}",
            "", "OPS/s", "BYTES/s", "AVERAGE", "P50", "P99", "P99.9"
        )
        .into(),
    ];
    let bytes = [Some(namespace.read), Some(namespace.written), None, None];
    let rows = IoKind::ALL.into_iter().zip(namespace.operations).zip(bytes);
    for (((kind, operations), bytes), latency) in rows.zip(&namespace.latency) {
        let at = |part| percentile(latency, operations, part);
        let average = latency.times.average().filter(|_| operations > 0.0);
        let average = average.map(|ns| marked(ns as u64, latency));
        lines.push(
            format!(
                "{:<7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8}",
                kind.name(),
                count_of(operations),
                bytes.map_or("-".into(), bytes_of),
                average.unwrap_or_else(|| "-".into()),
                at(0.5),
                at(0.99),
                at(0.999)
            )
            .into(),
        );
    }
    lines
}

/// Returns a percentile of the latency as text; empty for a disk without recent operations.
fn percentile(latency: &RecentTimes, operations: f64, part: f64) -> String {
    let found = latency.times.percentile(part);
    let found = found.filter(|_| operations > 0.0);
    found.map_or("-".into(), |time| marked(time, latency))
}

/// Formats a latency, with a mark if it covers more than the last interval.
fn marked(time: u64, latency: &RecentTimes) -> String {
    let mark = if latency.is_longer { "*" } else { "" };
    format!("{}{mark}", time_of(time))
}

/// Returns a value as text with at most four digits and a unit.
fn scaled(value: f64, base: f64, units: &[&str]) -> String {
    let (mut value, mut units) = (value, units.iter().peekable());
    let mut unit = units.next().copied().unwrap_or_default();
    while value >= base * 0.9995
        && let Some(next) = units.next()
    {
        value /= base;
        unit = next;
    }
    match value {
        v if v >= 99.95 || (unit.is_empty() && v.fract() == 0.0) => format!("{v:.0}{unit}"),
        0.0 => format!("0{unit}"),
        v => format!("{v:.1}{unit}"),
    }
}

fn count_of(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G"])
}

fn bytes_of(value: f64) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

fn time_of(nanoseconds: u64) -> String {
    scaled(nanoseconds as f64, 1000.0, &["ns", "us", "ms", "s"])
}

/// Replaces control and format characters. Names come from outside, and a terminal would interpret
/// them.
pub fn clean(text: &str) -> String {
    let plain = |c: char| !c.is_control() && !is_format(c);
    let shown = text.chars().map(|c| if plain(c) { c } else { '?' });
    shown.collect()
}

/// Returns whether a character changes the direction of text, or has no width (general category
/// Cf).
fn is_format(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
    )
}

/// Returns the number of columns of a character: two for wide East Asian ones.
fn columns(c: char) -> usize {
    match c {
        '\u{300}'..='\u{36f}' => 0,
        '\u{1100}'..='\u{115f}'
        | '\u{2e80}'..='\u{303e}'
        | '\u{3041}'..='\u{a4cf}'
        | '\u{ac00}'..='\u{d7a3}'
        | '\u{f900}'..='\u{faff}'
        | '\u{fe30}'..='\u{fe6f}'
        | '\u{ff00}'..='\u{ff60}'
        | '\u{ffe0}'..='\u{ffe6}'
        | '\u{1f300}'..='\u{1f64f}'
        | '\u{1f900}'..='\u{1f9ff}'
        | '\u{20000}'..='\u{3fffd}' => 2,
        _ => 1,
    }
}

/// Fits text into exactly `width` columns: truncates it visibly, or pads it with blanks.
pub fn fit(text: &str, width: usize) -> String {
    let text = clean(text);
    let all: usize = text.chars().map(columns).sum();
    if all <= width {
        return format!("{text}{}", " ".repeat(width - all));
    }
    let (mut cut, mut used) = (String::new(), 0);
    for c in text.chars() {
        if used + columns(c) >= width {
            break;
        }
        used += columns(c);
        cut.push(c);
    }
    if width > 0 {
        cut.push('~');
        used += 1;
    }
    format!("{cut}{}", " ".repeat(width.saturating_sub(used)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests;
