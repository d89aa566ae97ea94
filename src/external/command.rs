//! A command as a process group of its own: when its time is over all of it ends, children included.

use std::future::Future;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};

use super::tail::Tail;
use super::{Ask, End, Ran, Surroundings, VARIABLE_PREFIX};

/// Time between the request to end (SIGTERM) and the end (SIGKILL).
const GRACE: Duration = Duration::from_secs(10);
/// Time in which the rest of the output is read after the end, should somebody else hold it open.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) async fn run(
    command: &[String],
    ask: &Ask,
    surroundings: &Surroundings,
    time: Duration,
    cancelled: impl Future<Output = ()>,
) -> Ran {
    let Some((program, arguments)) = command.split_first() else {
        return Ran::of(End::Refused, None, "the class names no command", None);
    };
    let withheld = std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| name.to_string_lossy().starts_with(VARIABLE_PREFIX));
    let mut start = Command::new(program);
    start
        .args(arguments)
        .current_dir(&surroundings.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    for name in withheld {
        start.env_remove(name);
    }
    start.envs(&surroundings.variables).envs(ask.variables());
    #[cfg(unix)]
    start.process_group(0);
    let mut child = match start.spawn() {
        Ok(child) => child,
        Err(error) => {
            return Ran::of(End::Failed, None, format!("'{program}' cannot be started: {error}"), None);
        }
    };
    let mut group = Group(child.id());
    let tail = Tail::default();
    let mut readers = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        readers.push(tokio::spawn(tail.clone().read(stdout)));
    }
    if let Some(stderr) = child.stderr.take() {
        readers.push(tokio::spawn(tail.clone().read(stderr)));
    }
    let ended = tokio::select! {
        status = child.wait() => Some(status),
        () = tokio::time::sleep(time) => None,
        () = cancelled => {
            stop(&mut group, &mut child).await;
            return Ran::of(End::Cancelled, None, "it was stopped: its request has ended", tail.text());
        }
    };
    match &ended {
        // What it left running in the background writes nowhere any more.
        Some(_) => group.end().await,
        None => stop(&mut group, &mut child).await,
    }
    let last_words = async {
        for reader in &mut readers {
            // A reader that panicked has nothing more to say.
            let _ = reader.await;
        }
    };
    if tokio::time::timeout(LAST_WORDS, last_words).await.is_err() {
        readers.iter().for_each(tokio::task::JoinHandle::abort);
    }
    let output = tail.text();
    match ended {
        None => {
            Ran::of(End::TimedOut, None, format!("it was stopped after {} s", time.as_secs_f64()), output)
        }
        Some(Err(error)) => Ran::of(End::Failed, None, format!("its end cannot be known: {error}"), output),
        Some(Ok(status)) => match status.code() {
            Some(0) => Ran::of(End::Content, Some(0), "it succeeded", output),
            Some(code) => {
                Ran::of(End::Failed, Some(code.into()), format!("it ended with exit code {code}"), output)
            }
            None => Ran::of(End::Failed, None, "it was ended by a signal", output),
        },
    }
}

/// Asks it to end, and ends it.
async fn stop(group: &mut Group, child: &mut Child) {
    group.signal("TERM").await;
    // Its end is what is waited for, whatever its status is.
    let _ = tokio::time::timeout(GRACE, child.wait()).await;
    group.end().await;
    let _ = child.start_kill();
    let _ = child.wait().await;
}

/// The process group of a command, which does not outlive this value; none once it was ended: its number may soon be
/// somebody else's.
struct Group(Option<u32>);

impl Group {
    async fn end(&mut self) {
        self.signal("KILL").await;
        self.0 = None;
    }

    /// A group that is gone already is no error.
    async fn signal(&self, name: &str) {
        if let Some(kill) = self.kill(name) {
            let _ = Command::from(kill).status().await;
        }
    }

    /// Through a shell's own `kill`, since neither the standard library nor tokio has a way to signal a group.
    fn kill(&self, name: &str) -> Option<std::process::Command> {
        let mut kill = std::process::Command::new("sh");
        kill.args(["-c", "kill -s \"$0\" -- \"-$1\"", name]).arg(self.0?.to_string());
        kill.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Some(kill)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(mut kill) = self.kill("KILL") {
            let _ = kill.status();
        }
    }
}
