-- Commands on sets.
local parts = ...

local command, value = parts.command, parts.value
local next, pairs = next, pairs

local function members(space, key)
  local set = value(space, key, 'set')
  return set and set.members or {}
end

command('SADD', -3, 'wm', function(space, args, n)
  local set = value(space, args[2], 'set')
  if not set then
    set = {kind = 'set', members = {}}
    space.keys[args[2]] = set
  end
  local new = 0
  for i = 3, n do
    if not set.members[args[i]] then
      set.members[args[i]] = true
      new = new + 1
    end
  end
  return new
end)

command('SREM', -3, 'w', function(space, args, n)
  local set_members, removed = members(space, args[2]), 0
  for i = 3, n do
    if set_members[args[i]] then
      set_members[args[i]] = nil
      removed = removed + 1
    end
  end
  if removed > 0 and next(set_members) == nil then space.keys[args[2]] = nil end
  return removed
end)

command('SISMEMBER', 3, '', function(space, args)
  return members(space, args[2])[args[3]] and 1 or 0
end)

command('SMEMBERS', 2, '', function(space, args)
  local found = {}
  for member in pairs(members(space, args[2])) do found[#found + 1] = member end
  return found
end)
