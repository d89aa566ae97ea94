//! A catalog that misbehaves on order: it stands between a worker and the real SQL catalog.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::future::BoxFuture;
use mergeberg::table::catalog::{Capabilities, Catalog, CatalogError, CommitOutcome};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::ids::TableName;

/// What a worker's commit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Staging,
    Landing,
    /// Of a temporary branch, with or without its snapshots.
    Removal,
}

/// What the catalog does with a commit.
pub enum Do {
    ApplyThenLose,
    LoseBeforeApplying,
    /// The same, and no answer to anything afterwards.
    ApplyThenFallSilent,
    FallSilentBeforeApplying,
    /// "Applied", and nothing is.
    SayOk,
    SayPointerMoved,
    /// It could not be asked; nothing is applied.
    SayUnavailable,
    FirstThenRefuse(BoxFuture<'static, ()>, &'static str),
    /// This first, then the commit as it is.
    First(BoxFuture<'static, ()>),
    /// This first; then the commit without its requirement on the target, on the table as it is then.
    FirstThenIgnoreTarget(BoxFuture<'static, ()>),
}

/// Makes an answer; each commit gets its own.
pub type Answer = fn() -> Do;

pub struct Scripted {
    inner: Arc<SqlCatalog>,
    script: Mutex<VecDeque<(Kind, Do)>>,
    /// The answer to every commit of a kind that the script does not speak of.
    always: Mutex<Option<(Kind, Answer)>>,
    silent: AtomicBool,
    /// What happens between a load and its answer, and at which load.
    during_load: Mutex<Option<(usize, BoxFuture<'static, ()>)>>,
    loads: AtomicUsize,
    commits: Mutex<Vec<Kind>>,
}

impl Scripted {
    pub fn over(inner: &Arc<SqlCatalog>) -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::clone(inner),
            script: Mutex::default(),
            always: Mutex::default(),
            silent: AtomicBool::default(),
            during_load: Mutex::default(),
            loads: AtomicUsize::default(),
            commits: Mutex::default(),
        })
    }

    /// The next commit of this kind, after those that were ordered before.
    pub fn next(&self, kind: Kind, act: Do) {
        self.script.lock().unwrap().push_back((kind, act));
    }

    pub fn always(&self, kind: Kind, act: Answer) {
        *self.always.lock().unwrap() = Some((kind, act));
    }

    pub fn be_honest(&self) {
        *self.always.lock().unwrap() = None;
    }

    /// From now on nothing is answered, or it is again.
    pub fn be_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::SeqCst);
    }

    /// Between load number `at` (from 0) and its answer.
    pub fn during_load(&self, at: usize, act: BoxFuture<'static, ()>) {
        *self.during_load.lock().unwrap() = Some((at, act));
    }

    pub fn commits(&self, kind: Kind) -> usize {
        self.commits.lock().unwrap().iter().filter(|k| **k == kind).count()
    }

    pub fn is_played(&self) -> bool {
        self.script.lock().unwrap().is_empty() && self.during_load.lock().unwrap().is_none()
    }

    fn take(&self, kind: Kind) -> Option<Do> {
        self.commits.lock().unwrap().push(kind);
        let mut script = self.script.lock().unwrap();
        if let Some(at) = script.iter().position(|(k, _)| *k == kind) {
            return script.remove(at).map(|(_, act)| act);
        }
        let always = self.always.lock().unwrap();
        always.as_ref().filter(|(k, _)| *k == kind).map(|(_, act)| act())
    }

    fn listen(&self) -> Result<(), CatalogError> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(CatalogError::Unavailable("it is silent".to_owned()));
        }
        Ok(())
    }
}

fn kind_of(requirements: &[Requirement], updates: &[Update]) -> Kind {
    if updates.iter().any(|u| matches!(u, Update::AddSnapshot(_)))
        || requirements.iter().any(|r| matches!(r, Requirement::RefAt { role: RefRole::NewName, .. }))
    {
        Kind::Staging
    } else if updates.iter().any(|u| matches!(u, Update::SetRef(_))) {
        Kind::Landing
    } else {
        Kind::Removal
    }
}

fn lost() -> CommitOutcome {
    CommitOutcome::Unknown("503 Service Unavailable".to_owned())
}

#[async_trait]
impl Catalog for Scripted {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        self.listen()?;
        self.inner.list_tables().await
    }

    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        self.listen()?;
        let loaded = self.inner.load(table).await;
        let number = self.loads.fetch_add(1, Ordering::SeqCst);
        let act = self.during_load.lock().unwrap().take_if(|(at, _)| *at == number);
        if let Some((_, act)) = act {
            act.await;
        }
        loaded
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        if let Err(error) = self.listen() {
            return CommitOutcome::Refused(error);
        }
        match self.take(kind_of(requirements, &updates)) {
            None => self.inner.commit(base, requirements, updates).await,
            Some(Do::ApplyThenLose) => {
                let outcome = self.inner.commit(base, requirements, updates).await;
                assert!(matches!(outcome, CommitOutcome::Landed(_)), "it was to be applied: {outcome:?}");
                lost()
            }
            Some(Do::LoseBeforeApplying) => lost(),
            Some(Do::SayOk) => CommitOutcome::Landed(Arc::new(base.clone())),
            Some(Do::SayPointerMoved) => CommitOutcome::PointerMoved,
            Some(Do::ApplyThenFallSilent) => {
                let outcome = self.inner.commit(base, requirements, updates).await;
                assert!(matches!(outcome, CommitOutcome::Landed(_)), "it was to be applied: {outcome:?}");
                self.be_silent(true);
                lost()
            }
            Some(Do::FallSilentBeforeApplying) => {
                self.be_silent(true);
                lost()
            }
            Some(Do::SayUnavailable) => {
                CommitOutcome::Refused(CatalogError::Unavailable("try again later".to_owned()))
            }
            Some(Do::FirstThenRefuse(act, why)) => {
                act.await;
                CommitOutcome::Refused(CatalogError::Refused(why.to_owned()))
            }
            Some(Do::First(act)) => {
                act.await;
                self.inner.commit(base, requirements, updates).await
            }
            Some(Do::FirstThenIgnoreTarget(act)) => {
                act.await;
                let now = self.inner.load(&base.facts.name).await.unwrap();
                let rest: Vec<Requirement> = requirements
                    .iter()
                    .filter(|r| !matches!(r, Requirement::RefAt { role: RefRole::Target, .. }))
                    .cloned()
                    .collect();
                self.inner.commit(&now, &rest, updates).await
            }
        }
    }
}
